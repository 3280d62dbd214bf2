"""Observers of a run: they turn its events into metrics, traces and logs and change nothing."""
