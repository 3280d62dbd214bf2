"""`batching: auto`: batch limits from measured times."""
