import json
import math
from collections import deque
from dataclasses import dataclass, field

import pytest

from polyrhythm.scheduler.codec import UNSAVED, Codec
from polyrhythm.scheduler.records import Request, Ticket
from polyrhythm.scheduler.samples.groups import SampleState


@dataclass(slots=True)
class Box:
    content: object
    owner: str = field(default="", metadata=UNSAVED)


CODEC = Codec([Box, Request, Ticket, SampleState])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**62 + 1,
        0.1,
        math.inf,
        "text",
        (1, ("a", [2])),
        [1, (2,)],
        {1: "a", (2, 3): {"x": ()}},
        deque([(1, 2)]),
        SampleState.RUNNING,
        Ticket(1, 2, 0, 0, 2**63 - 1, 5, 3),
        Request("slot", "simulator", 3, 1, 0, "address", math.inf),
    ],
)
def test_values_survive_json_with_their_types(value: object) -> None:
    decoded = CODEC.decode(json.loads(json.dumps(CODEC.encode(Box(value, owner="me")))), {"owner": "you"})
    assert decoded == Box(value, owner="you")
    assert type(decoded.content) is type(value)


def test_what_is_not_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="object is not plain data"):
        CODEC.encode(object())


def test_data_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown record 'Gone'"):
        CODEC.decode({"$": "Gone"})
