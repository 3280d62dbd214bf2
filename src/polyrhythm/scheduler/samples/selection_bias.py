"""Selection bias of redundancy: lengths of the trained samples compared with those dropped as surplus.

A redundant sample is surplus when others were faster, so the trained samples lean to short episodes. Of a sample that
was finished the lengths are known. Of one that was cancelled in its row the progress is unknown; what is known is
for how long it had run, and that it would have needed longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.samples.groups import Sample
from polyrhythm.scheduler.samples.ledger import SampleState


@dataclass(slots=True)
class Lengths:
    """Sums over samples. seconds: from the last grant of a row to the end, the generators' time included."""

    samples: int = 0
    chunk_steps: int = 0
    env_steps: int = 0
    seconds: float = 0.0

    def add(self, sample: Sample, seconds: float) -> None:
        self.samples += 1
        self.chunk_steps += sample.chunk_steps
        self.env_steps += sample.env_steps
        self.seconds += seconds

    def means(self, *names: str) -> dict[str, float]:
        """How many, and the mean of each of these."""
        count = max(1, self.samples)
        return {"samples": self.samples, **{name: getattr(self, name) / count for name in names}}


@dataclass(slots=True)
class SelectionStats:
    """trained: of completed updates; released: surplus, but finished; cancelled: surplus, in their rows.

    waiting: surplus samples that were lost and not granted again, or had no row: nothing is known of them.
    """

    trained: Lengths = field(default_factory=Lengths)
    released: Lengths = field(default_factory=Lengths)
    cancelled: Lengths = field(default_factory=Lengths)
    waiting: int = 0

    def note_trained(self, sample: Sample) -> None:
        self.trained.add(sample, sample.seconds)

    def note_surplus(self, sample: Sample, now: float) -> None:
        """A sample is dropped as surplus now."""
        if sample.state in (SampleState.BUFFERED, SampleState.SCORING):
            self.released.add(sample, sample.seconds)
        elif sample.state is SampleState.RUNNING:
            self.cancelled.add(sample, now - sample.started)
        else:
            self.waiting += 1

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Means by fate. Compare trained with released by steps (the released are members of groups that were too
        slow as a whole), and with cancelled by seconds, where the cancelled ones' are at least what they needed."""
        finished = ("chunk_steps", "env_steps", "seconds")
        return {
            "trained": self.trained.means(*finished),
            "released": self.released.means(*finished),
            "cancelled": self.cancelled.means("seconds"),
            "waiting": {"samples": self.waiting},
        }
