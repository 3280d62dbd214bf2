"""Rollout: which row produces which sample."""
