"""Optional parts. Each package registers what it adds in its `PLUGIN` (`polyrhythm.plugin`)."""
