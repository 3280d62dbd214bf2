"""Stations on a Ray cluster (`launcher: ray`). Ray starts, places and ends processes and brings their logs; it carries
no observation, sample or weight."""
