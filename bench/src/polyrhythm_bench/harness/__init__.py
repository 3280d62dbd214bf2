"""What several benchmarks share: processes, meters, comparisons."""
