"""Stations on the virtual clock: cost models in place of processes."""
