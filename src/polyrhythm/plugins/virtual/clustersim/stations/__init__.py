"""Simulated stations on the virtual clock: cost models instead of processes."""
