"""Environments in a Python of their own: `env.python`."""
