"""A run on several hosts: what each of them holds, and how the others get it."""
