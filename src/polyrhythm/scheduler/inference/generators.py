"""Generators in the serving half: which are present, live and idle, and when each applies newer weights.

A generator is live when it holds the applied version or a newer one; only live generators serve training requests.

A generator may be off (`set_off`, by an optional part): it ends what it has, but gets neither requests nor weights and
does not count for the applied version, as if it were absent. If no other is present, all are on.

Invariants: `live` is in the order of names; `idle` holds the live generators that could start a pass now (or streams,
if they have places for them), `away` those that could if they were on the device that they lease, `room` those with a
pass behind which a batch can wait. After every event `due_weights` over all generators is empty.

When weights are applied. `drain`: no training tickets are granted while a version waits, and the version is applied
once no training episode runs. `continue`, `abort`: it is applied between two forward passes, or between two decode
steps of streams, generator by generator. While an evaluation pins the weights, the live generators keep theirs. All
generators are checked only after a change of weights or when `quiet` or `pinned` change while a version waits;
otherwise only the generator whose pass has just ended is, so a request costs O(1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import ApplyWeights, Batch, Request, Stream
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.scheduler.versions import VersionLedger


@dataclass(slots=True)
class GeneratorState:
    """version: weights that it holds (-1: none yet); applying: version that it is loading.

    batch: the pass under way; began: its start; ahead: the batch queued behind it, at a generator of depth 2. streams:
    streams under way by number, including aborted ones until their end is reported; load: rows of the streams that are
    not pinned. pinned: version in its second copy, for background evaluation (-1: none yet, or loading); pinning: the
    second copy is loading; was_pinned: the last pass used the second copy. away: it leases its device and is not on it;
    off: it is switched off; host: its host.
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
    off: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)
    load: int = 0
    host: str = ""
    depth: int = 1
    began: float = 0.0
    ahead: Batch | None = None

    @property
    def busy(self) -> bool:
        """Whether it can take neither requests nor weights. Streams do not make it busy."""
        return self.batch is not None or self.applying is not None

    @property
    def requests(self) -> list[Request]:
        batched = [request for batch in (self.batch, self.ahead) if batch is not None for request in batch.requests]
        return batched + [stream.request for stream in self.streams.values()]

    @property
    def has_room(self) -> bool:
        """Whether a batch can wait behind its current training pass."""
        if self.depth == 1 or self.batch is None or self.ahead is not None:
            return False
        return not (self.batch.pinned or self.away)


@dataclass(slots=True)
class GeneratorRegistry:
    """present: generators that serve training, in the order of names; apart: the evaluator, if it does nothing else.

    away: live generators that could start a pass if they were on their devices; room: generators with a pass behind
    which a batch can wait, as they hold the newest published version. off: generators that are switched off, present or
    not. several_hosts: they run on more than one host.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    present: dict[str, GeneratorState] = field(default_factory=dict)
    apart: dict[str, GeneratorState] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    idle: dict[str, None] = field(default_factory=dict)
    away: dict[str, None] = field(default_factory=dict)
    room: dict[str, None] = field(default_factory=dict)
    newest: int = -1
    off: tuple[str, ...] = ()
    several_hosts: bool = field(default=False, init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self._count_hosts()

    def _count_hosts(self) -> None:
        self.several_hosts = len({generator.host for generator in self.present.values()}) > 1

    def join(self, generator: GeneratorState) -> None:
        if generator.name == self.settings.evaluator and self.settings.evaluator_only:
            self.apart[generator.name] = generator
            return
        self.present[generator.name] = generator
        self.present = {name: self.present[name] for name in sorted(self.present)}
        if self.off:
            self.set_off(self.off)
        self._count_hosts()

    def leave(self, name: str) -> GeneratorState:
        """Remove the generator; returns its last state."""
        if name in self.apart:
            return self.apart.pop(name)
        for group in (self.idle, self.away, self.room):
            group.pop(name, None)
        self.live = [other for other in self.live if other != name]
        left = self.present.pop(name)
        self._count_hosts()
        if self.off:
            self.set_off(self.off)
        return left

    def set_off(self, names: tuple[str, ...]) -> None:
        """Switch exactly these off, all others on, unless no other is present: then all are on. `update_live` must
        follow."""
        self.off = () if self.present.keys() <= set(names) else names
        for generator in self.present.values():
            generator.off = generator.name in self.off

    def find(self, name: str) -> GeneratorState | None:
        return self.present.get(name) or self.apart.get(name)

    @property
    def evaluator(self) -> GeneratorState | None:
        return self.find(self.settings.evaluator)

    def update_live(self, applied: int, published: int) -> None:
        """Recompute the live generators and what each can do: O(generators), after a change of weights."""
        self.newest = published
        for generator in self.present.values():
            generator.live = not generator.off and generator.version >= 0 and generator.version >= applied
            self.refresh(generator)
        self.live = [name for name, generator in self.present.items() if generator.live]

    def refresh(self, generator: GeneratorState) -> None:
        """Recompute what the generator can do, after it has begun or ended something."""
        name = generator.name
        for group in (self.idle, self.away, self.room):
            group.pop(name, None)
        if not generator.live:
            return
        if not generator.busy:
            (self.away if generator.away else self.idle)[name] = None
        elif generator.has_room and generator.version >= self.newest:
            self.room[name] = None

    def set_away(self, name: str, *, away: bool) -> None:
        """A generator left its leased device or came back. `lockstep`, which starts all batches at once, ignores it."""
        generator = self.find(name)
        if generator is not None and self.settings.batching != "lockstep":
            generator.away = away
            self.refresh(generator)


def due_weights(
    candidates: Iterable[GeneratorState], versions: VersionLedger, *, anyone_live: bool, quiet: bool, pinned: bool
) -> list[GeneratorState]:
    """The free `candidates` that apply weights now: the published ones, or the applied ones if `pinned`.

    quiet: no training episode runs. pinned: an evaluation pins the weights, so only generators that are not live yet
    take some: the applied ones. A generator that is not live cannot serve, so it also takes the published weights when
    these are the applied ones, or when no generator is live.
    """
    free = [generator for generator in candidates if not generator.busy and not generator.off]
    if pinned:
        return [generator for generator in free if not generator.live]
    behind = [generator for generator in free if generator.version < versions.published]
    if quiet or versions.settings.on_update != "drain" or not anyone_live:
        return behind
    return [generator for generator in behind if not generator.live and versions.published == versions.applied]


@dataclass(slots=True)
class WeightScheduler:
    """Creates the `ApplyWeights` of generators. seen: (quiet, pinned) when all generators were last checked."""

    seen: tuple[bool, bool] = (False, False)

    def apply_due(
        self, generators: GeneratorRegistry, versions: VersionLedger, *, changed: bool, quiet: bool, pinned: bool
    ) -> list[ApplyWeights]:
        """Commands after an event that may allow weights to be applied. changed: it changed which weights are held or
        offered."""
        if not (changed or (versions.waiting and (quiet, pinned) != self.seen)):
            return []
        self.seen = quiet, pinned
        generators.update_live(versions.applied, versions.published)
        return self._apply(generators.present.values(), generators, versions, quiet=quiet, pinned=pinned)

    def apply_due_to(
        self,
        generator: GeneratorState,
        generators: GeneratorRegistry,
        versions: VersionLedger,
        *,
        quiet: bool,
        pinned: bool,
    ) -> list[ApplyWeights]:
        """As `apply_due`, for one generator whose pass has just ended."""
        if generator.name in generators.apart or (generator.live and not versions.waiting):
            return []
        return self._apply((generator,), generators, versions, quiet=quiet, pinned=pinned)

    def _apply(
        self,
        candidates: Iterable[GeneratorState],
        generators: GeneratorRegistry,
        versions: VersionLedger,
        *,
        quiet: bool,
        pinned: bool,
    ) -> list[ApplyWeights]:
        due = due_weights(candidates, versions, anyone_live=bool(generators.live), quiet=quiet, pinned=pinned)
        version = versions.applied if pinned else versions.published
        for generator in due:
            generator.applying = version
            generators.refresh(generator)
        return [ApplyWeights(generator.name, version) for generator in due]
