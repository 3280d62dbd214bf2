"""The live workers: simulator, generator, trainer. They obey commands, do one unit of work at a time, and emit events.

`simulator` and what it imports reach neither torch nor transformers.
"""
