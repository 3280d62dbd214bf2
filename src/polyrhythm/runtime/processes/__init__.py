"""Station processes on this machine: how they start, are watched, replaced and ended."""
