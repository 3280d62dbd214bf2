"""ManiSkill 3 tasks, simulated one instance per row on the CPU or all rows together on a GPU."""
