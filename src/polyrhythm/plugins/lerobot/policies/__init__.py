"""Policies registered with LeRobot, which run in a process of their own, maybe in another Python."""
