"""Engines at a server, and the protocols of servers."""
