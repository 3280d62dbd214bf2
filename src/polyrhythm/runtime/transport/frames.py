"""A head and the pieces of memory that go with it, as one buffer.

    length of the head (4 bytes), head, padding, piece, padding, piece, padding, ...

The head is MessagePack of (content, bytes of each piece). Nothing is executed by reading one, and nothing is allocated
by what it claims: the pieces lie in the frame itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from polyrhythm.runtime.transport.drops import UnfitMessage

Piece = bytes | memoryview
Content = TypeVar("Content")
#: Bytes of the head's length; alignment of head and pieces.
_LENGTH, _ALIGNMENT = 4, 64
_encode = msgspec.msgpack.Encoder().encode


def parts_of(content: Any, pieces: Sequence[Piece] = ()) -> list[Piece]:
    """The parts of a frame, in order, to be written one after another."""
    head = _encode((content, [len(piece) for piece in pieces]))
    parts: list[Piece] = [len(head).to_bytes(_LENGTH, "little"), head, bytes(-(_LENGTH + len(head)) % _ALIGNMENT)]
    for piece in pieces:
        parts += (piece, bytes(-len(piece) % _ALIGNMENT))
    return parts


def pack(content: Any, pieces: Sequence[Piece] = ()) -> bytes:
    """The frame of what MessagePack can encode, and pieces of bytes."""
    return b"".join(parts_of(content, pieces))


def unpack(
    frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[tuple[Content, tuple[int, ...]]]
) -> tuple[Content, list[memoryview]]:
    """The content and its pieces, in place. UnfitMessage: this is no frame of such content."""
    view = memoryview(frame)
    begin = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    try:
        content, lengths = decoder.decode(view[_LENGTH:begin])
    except (ValueError, RecursionError) as error:
        raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes has no head ({error})") from error
    pieces = []
    for length in lengths:
        begin += -begin % _ALIGNMENT
        if length < 0 or begin + length > len(view):
            raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes cannot hold a piece of {length}")
        pieces.append(view[begin : begin + length])
        begin += length
    if begin + -begin % _ALIGNMENT != len(view):
        raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes; its pieces end at {begin}")
    return content, pieces
