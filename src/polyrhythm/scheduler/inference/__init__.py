"""Inference: which requests a generator serves in one forward pass, and with which weights."""
