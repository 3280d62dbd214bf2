"""Assembles and runs a training run: build, run loop, phases, evaluation."""
