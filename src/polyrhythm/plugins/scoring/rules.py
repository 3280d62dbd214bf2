"""The queue of finished samples that wait for their score, and which scorer has which of them.

First come, first served; a sample whose try failed goes first. Each try has a number of its own, because a sample may
be given up, or run again, while a scorer still works on what it was.

A sample whose scorer was lost is scored alone next time: its scorer has nothing else meanwhile. So a sample that ends
its scorer takes others with it once, and is not taken for one of them after that.

Invariants: a sample that is given up while a scorer reads it keeps its payload until the scorer has answered, or is
gone; no scorer has more samples than places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ScoringTry:
    """A sample to score. failed: tries before this one; alone: its scorer has nothing else meanwhile. number: of the
    try, -1 before it begins; given_up: nobody waits for the score; payload_id: what is then to be released, "" for
    nothing."""

    ticket: int
    failed: int = 0
    alone: bool = False
    number: int = -1
    given_up: bool = False
    payload_id: str = ""


@dataclass(slots=True)
class ScorerState:
    """A present scorer. under_way: its tries by number."""

    places: int
    under_way: dict[int, ScoringTry] = field(default_factory=dict)

    def takes(self, waiting: ScoringTry) -> bool:
        """Whether it has a place for this one now."""
        if waiting.alone or any(other.alone for other in self.under_way.values()):
            return not self.under_way
        return len(self.under_way) < self.places


@dataclass(slots=True)
class ScoringQueue:
    """waiting: samples without a scorer, in their order; scorers: by name; begun: tries so far."""

    waiting: deque[ScoringTry] = field(default_factory=deque)
    scorers: dict[str, ScorerState] = field(default_factory=dict)
    begun: int = 0

    def add(self, ticket: int) -> None:
        """A sample has finished."""
        self.waiting.append(ScoringTry(ticket))

    def start(self) -> list[tuple[str, ScoringTry]]:
        """Begin as many tries as scorers have places for: the scorer of each, the one with the fewest."""
        started: list[tuple[str, ScoringTry]] = []
        while self.waiting:
            first = self.waiting[0]
            able = [(len(scorer.under_way), name) for name, scorer in self.scorers.items() if scorer.takes(first)]
            if not able:
                break
            _, name = min(able)
            self.waiting.popleft()
            begun = replace(first, number=self.begun)
            self.begun += 1
            self.scorers[name].under_way[begun.number] = begun
            started.append((name, begun))
        return started

    def end(self, scorer: str, number: int) -> ScoringTry:
        """A try has ended."""
        return self.scorers[scorer].under_way.pop(number)

    def retry(self, ended: ScoringTry, *, blame: bool = True, alone: bool = False) -> None:
        """The sample goes first. blame: what has ended counts as a try."""
        again = replace(ended, number=-1, failed=ended.failed + blame, alone=ended.alone or alone)
        self.waiting.appendleft(again)

    def give_up(self, ticket: int, payload_id: str) -> bool:
        """Nobody waits for the sample's score any more; whether its payload can be released now: no scorer reads it.
        payload_id: what is to be released later otherwise."""
        self.waiting = deque(waiting for waiting in self.waiting if waiting.ticket != ticket)
        for scorer in self.scorers.values():
            for number, begun in scorer.under_way.items():
                if begun.ticket == ticket and not begun.given_up:
                    scorer.under_way[number] = replace(begun, given_up=True, payload_id=payload_id)
                    return False
        return True

    def detach(self, wanted: Collection[int]) -> None:
        """The run was resumed: its scorers are gone, which counts as no try. wanted: tickets that still exist."""
        under_way = [begun for scorer in self.scorers.values() for begun in scorer.under_way.values()]
        kept = [begun for begun in under_way if not begun.given_up]
        again = [replace(begun, number=-1) for begun in sorted(kept, key=lambda begun: begun.number)]
        self.waiting = deque(each for each in (*again, *self.waiting) if each.ticket in wanted)
        self.scorers.clear()
