"""The simulator station: hosts env batches, steps their rows and records samples."""
