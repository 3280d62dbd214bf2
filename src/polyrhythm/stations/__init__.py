"""Stations, the workers of a run: simulator, generator, trainer. They take commands, do one unit of work at a time,
emit events.

`simulator` imports neither torch nor transformers, directly or indirectly.
"""
