"""Simulators that join a run from another machine or Python environment: the token, what both ends say, who is let in.

A run waits for them at a port of its own (`plugins.join.joined`); `polyrhythm join` comes to it
(`plugins.join.joining`). docs/design/clusters-and-joining.md.
"""
