"""Simulator adapters: Meta-World, ManiSkill, robosuite, LIBERO; environments in a Python of their own."""
