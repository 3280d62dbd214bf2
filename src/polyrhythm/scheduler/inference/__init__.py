"""Serving: which generator answers which request, when, and with which version of the weights.

One of the two halves of the scheduler. It knows slots only as places that ask; tickets, rows and samples belong to the
other half (`rollout`, `samples`, `updates`), and neither half imports the other. The conductor joins them.
"""
