"""Downloads what a recipe names on the hub, first of all before a run."""

from polyrhythm.checks import Check
from polyrhythm.sources import fetch

CHECKS = (Check("downloads", "recipe", "trial", lambda context: fetch(context.config)),)
