"""robosuite 1.5 tasks, and RoboCasa kitchens, from states or pixels."""
