"""Shared memory of a run: the arena of samples and the weights bus."""
