"""Arenas for samples that are already there."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE
from polyrhythm.specs import ArraySpec, Trajectory


def layout_like(sample: Trajectory, *, blocks: int, steps: int, slots: dict[str, int] | None = None) -> ArenaLayout:
    """A layout of blocks that hold samples like this one, of at most `steps` chunk steps."""
    answers = {ACTIONS: sample.actions, LOGPROB: sample.logprob, VALUE: sample.value}
    answers |= {FORWARD_INPUTS + name: array for name, array in sample.forward_inputs.items()}
    return ArenaLayout(
        blocks=blocks,
        steps=steps,
        chunk=sample.valid.shape[1],
        obs={name: ArraySpec(array.shape[1:], array.dtype.name) for name, array in sample.obs.items()},
        answers={name: ArraySpec(array.shape[1:], array.dtype.name) for name, array in answers.items()},
        slots=slots or {"slot": 4},
        streamed=sample.newer is not None,
    )


def holding(samples: Sequence[Trajectory]) -> Arena:
    """An arena with one sample in each block, in order."""
    arena = in_memory(layout_like(samples[0], blocks=len(samples), steps=max(sample.steps for sample in samples)))
    for block, sample in enumerate(samples):
        arena.store(block, sample)
    return arena
