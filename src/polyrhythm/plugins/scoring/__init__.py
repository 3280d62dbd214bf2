"""Scorers: reward functions and models between a finished sample and its group."""
