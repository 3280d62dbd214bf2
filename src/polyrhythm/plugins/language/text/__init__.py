"""Text environments: prompts, messages and tools on top of the environment contract; they import neither torch nor
transformers."""

from polyrhythm.plugins.language.text.base import (
    Awaited,
    Awaits,
    Conversation,
    Demonstrates,
    Drops,
    Prepares,
    Reply,
    TextSettings,
    draw_apart,
    enclosed,
)

__all__ = [
    "Awaited",
    "Awaits",
    "Conversation",
    "Demonstrates",
    "Drops",
    "Prepares",
    "Reply",
    "TextSettings",
    "draw_apart",
    "enclosed",
]
