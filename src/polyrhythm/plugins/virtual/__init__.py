"""The scheduler on a simulated cluster in virtual time."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin("virtual", needs=("timeline",))
