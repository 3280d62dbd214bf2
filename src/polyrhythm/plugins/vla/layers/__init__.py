"""Transformer layers of the published VLA policies, with the parameter names of their released checkpoints."""
