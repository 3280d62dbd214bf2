"""Messages that are nearly right: damaged bytes, and whole messages in which one thing is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from polyrhythm.runtime.transport import wire
from polyrhythm.scheduler import records

#: What stands where something else should.
_EVIL: Sequence[Any] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, -0.5, float("nan"), float("inf")),
    *("", "x", "\x00", "../../etc", "ö" * 3000, "tcp://example.org:80", "99999999999999999999", b"\xff\x00", b""),
    *([], {}, [[]], [None] * 50, {"x": 1}, {"x": float("nan")}, [1, "2"]),
)
#: Lengths of arrays, maps, texts and bytes that nothing follows.
_HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff",
)


def mutations(contents: Sequence[bytes], count: int, seed: int, names: Mapping[str, Sequence[Any]]) -> Iterator[bytes]:
    """`count` mutations of these encoded messages. names: field → values that are right somewhere, so that what is
    wrong with a message is not always its sender."""
    rng = random.Random(seed)
    for number in range(count):
        content = contents[number % len(contents)]
        damage = rng.choice((_flip, _cut, _extend, _swap_tag, _lengthen, _nest, *[_replace] * 6))
        for _ in range(rng.choice((1, 1, 2))):
            content = damage(rng, content, names)
        yield content


def _flip(rng: random.Random, content: bytes, _names: Any) -> bytes:
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _cut(rng: random.Random, content: bytes, _names: Any) -> bytes:
    return content[: rng.randint(0, len(content))]


def _extend(rng: random.Random, content: bytes, _names: Any) -> bytes:
    return content + rng.randbytes(rng.randint(1, 40))


def _swap_tag(rng: random.Random, content: bytes, _names: Any) -> bytes:
    return bytes([rng.choice([rng.randrange(256), rng.randrange(len(wire.TYPES))])]) + content[1:]


def _lengthen(rng: random.Random, content: bytes, _names: Any) -> bytes:
    at = rng.randint(1, max(1, len(content)))
    return content[:at] + rng.choice(_HUGE) + content[at:]


def _nest(rng: random.Random, content: bytes, _names: Any) -> bytes:
    return content[:1] + b"\x81\xa1?" + rng.choice((b"\x91", b"\x81\xa1?")) * rng.randint(10, 20_000)


def _replace(rng: random.Random, content: bytes, names: Mapping[str, Sequence[Any]]) -> bytes:
    """One field somewhere gets another value, goes, or comes; names and numbers of the real run are filled in first."""
    try:
        fields = msgspec.msgpack.decode(content[1:])
    except ValueError:  # a reply, or damaged before
        return _flip(rng, content, names)
    fields = _with_names(content[0], fields)
    if rng.random() < 0.8:
        _fill_in(rng, fields, names)
    spots = list(_spots(fields))
    if spots and rng.random() < 0.9:
        holder, key = rng.choice(spots)
        if rng.random() < 0.1 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = deepcopy(rng.choice(_EVIL))
    elif isinstance(fields, dict):
        fields[rng.choice(("x", "incarnation", ""))] = deepcopy(rng.choice(_EVIL))
    return content[:1] + msgspec.msgpack.encode(_without_names(fields))


class _Named(dict[str, Any]):
    """A named tuple, which travels without the names of its fields."""


def _with_names(tag: int, value: Any) -> Any:
    """The content of a message with the fields of requests, its own or those in a batch, named."""
    if isinstance(value, list) and tag == wire.TYPES.index(records.RequestArrived):
        return _Named(zip(records.RequestArrived._fields, value, strict=False))
    batch = value.get("batch") if isinstance(value, dict) else None
    requests = batch.get("requests") if isinstance(batch, dict) else None
    for place, each in enumerate(requests if isinstance(requests, list) else ()):
        if isinstance(each, list):  # not damaged before
            requests[place] = _Named(zip(records.Request._fields, each, strict=False))
    return value


def _without_names(value: Any) -> Any:
    if isinstance(value, _Named):
        return [_without_names(item) for item in value.values()]
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()}
    return [_without_names(item) for item in value] if isinstance(value, list) else value


def _fill_in(rng: random.Random, value: Any, names: Mapping[str, Sequence[Any]]) -> None:
    for holder, key in list(_spots(value)):
        if key in names:
            holder[key] = deepcopy(rng.choice(names[key]))  # it may be damaged in its turn


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _spots(inner)


def mutated_frames(frames: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` mutations of frames that begin with the length of a head in MessagePack (`plugins.join.messages`)."""
    rng = random.Random(seed)
    for number in range(count):
        frame = frames[number % len(frames)]
        damage = rng.choice((_flip, _cut, _extend, _lengthen, _nest, *[_replace_in_head] * 6))
        yield damage(rng, frame, {})


def _replace_in_head(rng: random.Random, frame: bytes, _names: Any) -> bytes:
    """One field of the head gets another value, or goes; its length is right."""
    stop = 4 + int.from_bytes(frame[:4], "little")
    head = msgspec.msgpack.decode(frame[4:stop])
    holder, key = rng.choice(list(_spots(head)))
    if rng.random() < 0.1 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = deepcopy(rng.choice(_EVIL))
    content = msgspec.msgpack.encode(head)
    return len(content).to_bytes(4, "little") + content + bytes(-(4 + len(content)) % 64) + frame[stop + -stop % 64 :]
