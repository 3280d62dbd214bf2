"""Fault injection: a real run whose stations are killed, stopped and slowed."""
