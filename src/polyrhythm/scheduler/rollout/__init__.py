"""Rollout: which row produces which sample. Belongs to the ticket half; knows nothing of `inference`."""
