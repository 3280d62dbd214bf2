"""What the published VLA policies share: inputs, checkpoints, precision, and a policy over any flow network."""
