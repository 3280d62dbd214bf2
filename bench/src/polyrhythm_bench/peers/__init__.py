"""Other systems on the same workloads. `peer_NAME.py` is run by the Python of that system's environment."""
