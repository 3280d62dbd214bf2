"""Serving: which generator answers which request, when, and with which version of the weights.

One half of the scheduler. It knows slots only as sources of requests; tickets, rows and samples belong to the other
half (`rollout`, `samples`, `updates`). Neither half imports the other; the conductor joins them.
"""
