"""From trajectories and demonstrations to new weights, on one rank.

An update and a supervised phase are generators: each `next()` is one optimizer step, so that a host with one
thread can let rollout go on in between, and the metrics are the generator's return value (`steps.finish` runs one
through).
"""
