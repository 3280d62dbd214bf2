"""Environments that run in another Python: `env.python`."""
