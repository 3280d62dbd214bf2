"""Advantages, losses and levels: pure functions of tensors (torch only), without configuration or logging.

Words: a *decision* is one chunk step; an *entry* is what a loss is taken over at its level (one token, one
action, one chunk). Masks and weights are arguments; where a mean is meant, the caller gives the normaliser.
"""
