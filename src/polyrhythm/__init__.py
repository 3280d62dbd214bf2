"""Polyrhythm: reinforcement-learning post-training of robot policies, each part at its own tempo."""

__version__ = "0.1.0"
