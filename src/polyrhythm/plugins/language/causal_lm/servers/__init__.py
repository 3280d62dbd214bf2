"""Engines at a server: what all share, and the protocols that servers speak."""
