"""One module for each tracker: its settings and its sink."""
