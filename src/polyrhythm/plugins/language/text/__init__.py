"""Text environments: prompts, messages and tools on top of the environment contract; they import neither torch nor
transformers."""

from polyrhythm.plugins.language.text.base import (
    Awaited,
    Conversation,
    ConversationTraits,
    FullConversation,
    Reply,
    TextSettings,
    draw_apart,
    enclosed,
)

__all__ = [
    "Awaited",
    "Conversation",
    "ConversationTraits",
    "FullConversation",
    "Reply",
    "TextSettings",
    "draw_apart",
    "enclosed",
]
