"""Training on one rank: trajectories and demonstrations to new weights.

An update and a supervised phase are generators: each `next()` is one optimizer step, so that a host with one thread can
continue rollout in between. The return value is the metrics (`steps.finish` runs a generator to its end).
"""
