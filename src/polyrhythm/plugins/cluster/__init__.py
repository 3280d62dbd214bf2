"""A run on several hosts: agents, sealed connections, Ray."""
