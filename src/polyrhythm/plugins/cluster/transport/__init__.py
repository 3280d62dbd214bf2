"""Sealed connections between the hosts of a run."""
