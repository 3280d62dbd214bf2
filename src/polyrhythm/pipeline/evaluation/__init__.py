"""Held-out evaluation: before, during and after training, and of a trained policy alone."""
