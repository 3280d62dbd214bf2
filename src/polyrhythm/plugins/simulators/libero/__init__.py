"""LIBERO's five suites of manipulation tasks, from pixels and proprioception."""
