"""Commands that list recipes and settings, explain codes of errors, and copy examples."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "listing",
    adds={
        "command": {
            "explain": "polyrhythm.plugins.listing.commands:Explain",
            "new": "polyrhythm.plugins.listing.commands:New",
            "recipes": "polyrhythm.plugins.listing.commands:Recipes",
            "settings": "polyrhythm.plugins.listing.commands:Settings",
        },
    },
    purposes={
        "explain": "print cause and remedy of an error message's code",
        "new": "copy an example into a new folder",
        "recipes": "list the recipes",
        "settings": "list the settings of a recipe, their defaults and meaning",
    },
)
