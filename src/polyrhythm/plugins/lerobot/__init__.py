"""Demonstrations as folders in the LeRobotDataset v3.0 layout: writing, reading, recording and statistics."""
