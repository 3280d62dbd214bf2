"""The benchmarks of `polyrhythm bench`, one module each."""
