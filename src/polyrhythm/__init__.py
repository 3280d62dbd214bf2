"""Polyrhythm: reinforcement-learning post-training of robot policies, each part at its own tempo."""
