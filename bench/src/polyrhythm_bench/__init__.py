"""Benchmarks of Polyrhythm and comparisons with its peers: a distribution of its own."""
