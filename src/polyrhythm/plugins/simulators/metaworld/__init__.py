"""Meta-World tasks with rendered observations."""
