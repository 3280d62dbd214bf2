"""Text environments: prompts, messages and tools on top of the environment contract, without torch or transformers."""

from polyrhythm.plugins.language.text.base import TextSettings, draw_apart, enclosed
from polyrhythm.plugins.language.text.conversation import (
    Awaited,
    Conversation,
    ConversationTraits,
    FullConversation,
    Reply,
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
