"""Other systems beside ours on the same work. Files named after a system are run by that system's own Python."""
