"""Held-out evaluation: before, beside and after training, and of a trained policy alone."""
