"""Commands that list recipes and settings, and copy examples."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "listing",
    adds={
        "command": {
            "new": "polyrhythm.plugins.listing.commands:New",
            "recipes": "polyrhythm.plugins.listing.commands:Recipes",
            "settings": "polyrhythm.plugins.listing.commands:Settings",
        },
    },
    purposes={
        "new": "copy an example into a new folder",
        "recipes": "list the recipes",
        "settings": "list the settings of a recipe, their defaults and meaning",
    },
)
