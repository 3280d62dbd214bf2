"""A trainer of several ranks."""
