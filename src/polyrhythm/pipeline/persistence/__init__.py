"""Saving of runs, and resuming of saved ones."""
