"""What the serving half knows of the generators: who is present, live and idle.

A generator is live when it holds the applied version or a newer one; only live generators serve training requests.

Invariants: `live` is in the order of names; `idle` holds the live generators that could start a pass now (or streams,
if they have places for them), `away` those that could if they were on the device that they lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Batch, Request, Stream
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class GeneratorState:
    """version: weights that it holds (-1: none yet); applying: version that it is loading; batch: the pass under way;
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

    @property
    def busy(self) -> bool:
        """Whether it can neither be given requests nor weights. Streams do not keep it from either."""
        return self.batch is not None or self.applying is not None

    @property
    def requests(self) -> list[Request]:
        """The requests that it works on."""
        return [*(self.batch.requests if self.batch else ()), *(stream.request for stream in self.streams.values())]


@dataclass(slots=True)
class GeneratorRegistry:
    """present: generators that serve training, by name and in the order of names; apart: the evaluator, if it serves
    nothing but evaluation. away: live generators that could start a pass if they were on their devices."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    present: dict[str, GeneratorState] = field(default_factory=dict)
    apart: dict[str, GeneratorState] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    idle: dict[str, None] = field(default_factory=dict)
    away: dict[str, None] = field(default_factory=dict)

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
        self.idle.pop(name, None)
        self.away.pop(name, None)
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

    def update_live(self, applied: int) -> None:
        """Find anew which generators are live and which of them are idle: O(generators), after a change of weights."""
        for generator in self.present.values():
            generator.live = generator.version >= 0 and generator.version >= applied
        self.live = [name for name, generator in self.present.items() if generator.live]
        self.idle.clear()
        self.away.clear()
        for name in self.live:
            self.note_free(self.present[name])

    def note_busy(self, generator: GeneratorState) -> None:
        self.idle.pop(generator.name, None)
        self.away.pop(generator.name, None)

    def note_free(self, generator: GeneratorState) -> None:
        if generator.live and not generator.busy:
            (self.away if generator.away else self.idle)[generator.name] = None

    def note_away(self, name: str, *, away: bool) -> None:
        """A generator left the device that it leases, or is on it again. `lockstep` starts all batches at once,
        wherever their generators are."""
        generator = self.find(name)
        if generator is None or self.settings.batching == "lockstep":
            return
        generator.away = away
        self.note_busy(generator)
        if name in self.present:
            self.note_free(generator)
