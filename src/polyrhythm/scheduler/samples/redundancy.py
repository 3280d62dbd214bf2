"""Redundant tickets: more groups and members run than an update needs, and the first to finish are trained.

Admission reserves a place for every group that an update will need. `extra_groups` spare groups may run beside those,
without a place; `extra_members` tickets of a group may run beside the `group_size` that it needs. Both get rows only
while admission has no ticket to give. When a spare group is complete first, an unfinished one hands its place over, the
oldest of them, and becomes spare in its stead; so does a group that is dropped, while there are spare ones.

A place is only ever handed to a group of the same or a younger version. So the total stays, the sum over the versions
up to any s does not grow, and the slack of every version (see `admission`) does not fall: the lag bound and the
freedom from deadlock are those of admission alone.

Invariant, once an event is settled: at most `extra_groups` groups are spare, none of them is complete, and each could
still take the place of an unfinished group that is not younger; a spare group that could not is surplus.

The price is a bias, which is measured (`SelectionStats`): a redundant sample is surplus when others were faster, so the
trained samples lean to short episodes. Of a sample that was finished the lengths are known. Of one that was cancelled
in its row the progress is unknown; what is known is for how long it had run, and that it would have needed longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import Ticket
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import Group, Sample
from polyrhythm.scheduler.samples.ledger import SampleState


def oldest_missing(admission: Admission, buffer: SampleBuffer) -> int | None:
    """The oldest version with a place whose group is not complete."""
    size = admission.settings.group_size
    missing = (
        version for version, places in admission.outstanding.items() if places > size * buffer.complete_groups(version)
    )
    return min(missing, default=None)


def is_closed(admission: Admission, buffer: SampleBuffer) -> bool:
    """Whether `next_ticket` has none to give."""
    if admission.lacking:
        return False
    return len(admission.spare) >= admission.settings.extra_groups or oldest_missing(admission, buffer) is None


def next_ticket(admission: Admission, buffer: SampleBuffer, version: int) -> Ticket | None:
    """A redundant ticket at applied version `version`: an extra member of the oldest group that lacks one, or the
    first of a new spare group (the others then come from admission, which grants a group that is begun); or None."""
    while admission.lacking:
        group = admission.groups.get(admission.lacking[0])
        if group is not None and not group.complete and group.granted < admission.settings.group_tickets:
            return admission.add_member(group, version)
        admission.lacking.popleft()
    if is_closed(admission, buffer):
        return None
    return admission.add_member(admission.open(version, spare=True), version)


def promote_spare(admission: Admission, group: Group) -> None:
    """A spare group is complete: it takes the place of the oldest one that is not."""
    admission.transfer_quota(
        next(other for other in admission.groups.values() if not other.spare and not other.complete), group
    )


def replace_by_spare(admission: Admission, group: Group) -> None:
    """A group with a place is about to be dropped: the spare one that began first takes it, if it is not older."""
    able = (number for number in admission.spare if admission.groups[number].version >= group.version)
    number = min(able, default=None)
    if number is not None:
        admission.transfer_quota(group, admission.groups[number])


def surplus(admission: Admission, buffer: SampleBuffer) -> list[Group]:
    """The spare groups that cannot take another group's place any more."""
    missing = oldest_missing(admission, buffer)
    spare = [admission.groups[number] for number in admission.spare]
    return [group for group in spare if missing is None or missing > group.version]


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

    def add_trained(self, sample: Sample) -> None:
        self.trained.add(sample, sample.seconds)

    def add_surplus(self, sample: Sample, now: float) -> None:
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
