"""Scheduling decisions of a run, without I/O: standard library only, no clock, no threads.

Two halves that do not know each other, joined by `conductor`: tickets (`rollout`, `samples`, `updates`) and serving
(`inference`).
"""
