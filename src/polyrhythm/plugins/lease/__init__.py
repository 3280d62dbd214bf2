"""Devices that stations hold in turn."""
