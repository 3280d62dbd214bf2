"""What the conductor knows of one generator."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.scheduler.records import Batch


@dataclass(slots=True)
class GeneratorState:
    """version: weights that it holds (-1: none yet); applying: version on its way in; batch: the pass under way.

    pinned: weights in its copy for evaluation (-1: none yet, or on their way); pinning: some are on their way there;
    was_pinned: the last pass was with that copy.
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

    @property
    def busy(self) -> bool:
        return self.batch is not None or self.applying is not None
