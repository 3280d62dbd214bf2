"""Stations, the workers of a run: simulator, generator, trainer. They take commands, do units of work, emit events.

`simulator` imports neither torch nor transformers, directly or indirectly.
"""
