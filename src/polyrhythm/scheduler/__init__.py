"""The brain: every decision of a run, without I/O. Standard library only."""
