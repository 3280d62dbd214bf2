"""Optional parts. Each folder has a module `plugin` that registers what it adds (`polyrhythm.plugin`)."""
