"""Environments, policies and scenes that benchmarks run."""
