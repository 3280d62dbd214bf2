"""Finds a placement: a profile of each station's work, and a search over what the simulated cluster predicts from it.

profile     the file of measured times and memory: begin reading here
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin("planning", needs=("virtual", "memory_estimate"))
