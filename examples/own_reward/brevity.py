"""Your own reward function: right answers are worth more the shorter they are. `polyrhythm train brief.yaml`, here."""

from __future__ import annotations

from polyrhythm.specs import SampleView


def brevity(sample: SampleView, *, per_character: float = 0.005) -> float:
    """Beside the environment's own reward, 1 for a right answer: what its length costs."""
    return -per_character * len(sample.reply) if sample.success else 0.0
