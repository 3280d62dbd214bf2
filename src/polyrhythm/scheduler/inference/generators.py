"""What the serving half knows of the generators: who is present, live and idle.

A generator is live when it holds the applied version or a newer one; only live generators serve training requests.

Invariants: `live` is in the order of names; `idle` holds the live generators that could start a pass now (or streams,
if they have places for them), `away` those that could if they were on the device that they lease, `room` those that do
a pass behind which a batch can wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Batch, Request, Stream
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class GeneratorState:
    """version: weights that it holds (-1: none yet); applying: version that it is loading; batch: the pass under way;
    began: when it began; ahead: the batch that waits behind it, at a generator of depth 2.

    streams: those under way by number, aborted ones included until their end is reported; load: rows of those that are
    not pinned.

    pinned: version in its second copy, for background evaluation (-1: none yet, or loading); pinning: the second copy
    is loading; was_pinned: the last pass used the second copy. away: it leases its device and is not on it. host: where
    it works.
    """

    name: str
    incarnation: int
    version: int = -1
    applying: int | None = None
    batch: Batch | None = None
    served_rows: int = 0
    pinned: int = -1
    pinning: bool = False
    was_pinned: bool = False
    live: bool = False
    away: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)
    load: int = 0
    host: str = ""
    depth: int = 1
    began: float = 0.0
    ahead: Batch | None = None

    @property
    def busy(self) -> bool:
        """Whether it can neither be given requests nor weights. Streams do not keep it from either."""
        return self.batch is not None or self.applying is not None

    @property
    def requests(self) -> list[Request]:
        """The requests that it works on."""
        batches = [batch for batch in (self.batch, self.ahead) if batch is not None]
        return [
            *(request for batch in batches for request in batch.requests),
            *(stream.request for stream in self.streams.values()),
        ]

    @property
    def has_room(self) -> bool:
        """Whether a batch can wait behind the pass for training that it does."""
        if self.depth == 1 or self.batch is None or self.ahead is not None:
            return False
        return not (self.batch.pinned or self.away)


@dataclass(slots=True)
class GeneratorRegistry:
    """present: generators that serve training, by name and in the order of names; apart: the evaluator, if it serves
    nothing but evaluation. away: live generators that could start a pass if they were on their devices; room: those
    behind whose passes a batch can wait, as they hold the newest published version."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    present: dict[str, GeneratorState] = field(default_factory=dict)
    apart: dict[str, GeneratorState] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    idle: dict[str, None] = field(default_factory=dict)
    away: dict[str, None] = field(default_factory=dict)
    room: dict[str, None] = field(default_factory=dict)
    newest: int = -1

    def join(self, generator: GeneratorState) -> None:
        if generator.name == self.settings.evaluator and self.settings.evaluator_only:
            self.apart[generator.name] = generator
            return
        self.present[generator.name] = generator
        self.present = {name: self.present[name] for name in sorted(self.present)}

    def leave(self, name: str) -> GeneratorState:
        """Forget the generator; returns its last state."""
        if name in self.apart:
            return self.apart.pop(name)
        for group in (self.idle, self.away, self.room):
            group.pop(name, None)
        self.live = [other for other in self.live if other != name]
        return self.present.pop(name)

    def find(self, name: str) -> GeneratorState | None:
        """The present generator of this name."""
        return self.present.get(name) or self.apart.get(name)

    @property
    def several_hosts(self) -> bool:
        """Whether generators work on several hosts."""
        return len({generator.host for generator in self.present.values()}) > 1

    @property
    def evaluator(self) -> GeneratorState | None:
        """The generator that answers background evaluations."""
        return self.find(self.settings.evaluator)

    def update_live(self, applied: int, published: int) -> None:
        """Find anew which generators are live and what they could do: O(generators), after a change of weights."""
        self.newest = published
        for generator in self.present.values():
            generator.live = generator.version >= 0 and generator.version >= applied
            self.note(generator)
        self.live = [name for name, generator in self.present.items() if generator.live]

    def note(self, generator: GeneratorState) -> None:
        """The generator has begun or ended something: find anew what it could do."""
        name = generator.name
        for group in (self.idle, self.away, self.room):
            group.pop(name, None)
        if not generator.live:
            return
        if not generator.busy:
            (self.away if generator.away else self.idle)[name] = None
        elif generator.has_room and generator.version >= self.newest:
            self.room[name] = None

    def note_away(self, name: str, *, away: bool) -> None:
        """A generator left the device that it leases, or is on it again. `lockstep` starts all batches at once,
        wherever their generators are."""
        generator = self.find(name)
        if generator is None or self.settings.batching == "lockstep":
            return
        generator.away = away
        self.note(generator)
