"""The commands `polyrhythm bench` and `polyrhythm chaos`."""
