"""Shared by several benchmarks: processes, meters, comparisons."""
