"""The arena: where everything lies, and that a sample comes out as it went in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.runtime.arenas import holding, layout_like
from tests.training.toy import CHUNK, DIM, FEATURES, ToyPolicy, collect

from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.messages import ACTIONS, LOGPROB, VALUE, VERSION
from polyrhythm.specs import ArraySpec, Trajectory

SAMPLES = collect(ToyPolicy(), lengths=(4, 1, 6, 3))


def assert_same(found: Trajectory, wanted: Trajectory) -> None:
    for field in fields(Trajectory):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one), field.name
        else:
            assert np.array_equal(one, other), field.name
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name


def arrays_of(arena: Arena) -> list[NDArray[Any]]:
    areas = [arena.requests[slot] for slot in arena.layout.slots]
    return [arena.head, arena.answers, arena.rewards, arena.valid, *arena.obs.values(), *areas]


dtypes = st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "int32"])
specs = st.builds(ArraySpec, st.lists(st.integers(1, 5), max_size=3).map(tuple), dtypes)


@given(
    st.builds(
        ArenaLayout,
        blocks=st.integers(1, 5),
        steps=st.integers(1, 7),
        chunk=st.integers(1, 4),
        obs=st.dictionaries(st.text(min_size=1), specs, max_size=3),
        answers=st.dictionaries(st.sampled_from(["a", "b", "c"]), specs, min_size=1),
        slots=st.dictionaries(st.text(), st.integers(1, 9), max_size=3),
    )
)
def test_arrays_are_aligned_and_share_no_byte(layout: ArenaLayout) -> None:
    memory = np.zeros(layout.nbytes, np.uint8)
    arrays = arrays_of(Arena(layout, memory.data))
    offsets = [array.ctypes.data - memory.ctypes.data for array in arrays]
    assert all(offset % 64 == 0 for offset in offsets)
    assert offsets == sorted(offsets)
    ends = [offset + array.nbytes for offset, array in zip(offsets, arrays, strict=True)]
    assert all(end <= offset for end, offset in zip(ends, [*offsets[1:], layout.nbytes], strict=True))
    assert [(a.shape, a.dtype) for a in arrays] == [(shape, dtype) for _, shape, dtype in layout.arrays()]


def test_an_arena_has_an_entry_for_every_step_of_every_block_and_one_more_each() -> None:
    layout = layout_like(SAMPLES[0], blocks=3, steps=6, slots={"a": 2, "b": 5})
    arena = in_memory(layout)
    assert layout.entries == 7
    assert arena.obs["x"].shape == (21, FEATURES)
    assert arena.answers.shape == (21,)
    assert arena.answers[ACTIONS].shape == (21, CHUNK, DIM)
    assert arena.answers[VERSION].dtype == np.int64
    assert arena.rewards.shape == arena.valid.shape == (21, CHUNK)


def test_too_little_memory_is_refused() -> None:
    layout = layout_like(SAMPLES[0], blocks=3, steps=6)
    with pytest.raises(ValueError, match="buffer"):
        Arena(layout, bytearray(layout.nbytes - 64))


def test_what_is_written_by_entry_is_read_by_block() -> None:
    """As a simulator and a generator write it: a step at a time, then the head."""
    arena = in_memory(layout_like(SAMPLES[0], blocks=3, steps=6))
    sample = SAMPLES[2]
    for step in range(sample.steps):
        entry = step * 3 + 2
        arena.obs["x"][entry] = sample.obs["x"][step]
        record = arena.answers[entry : entry + 1]
        record[ACTIONS], record[LOGPROB], record[VALUE] = (
            array[step : step + 1] for array in (sample.actions, sample.logprob, sample.value)
        )
        record["forward_inputs.tokens"] = sample.forward_inputs["tokens"][step : step + 1]
        record[VERSION] = sample.version[step]
        arena.rewards[entry], arena.valid[entry] = sample.rewards[step], sample.valid[step]
    arena.obs["x"][sample.steps * 3 + 2] = sample.obs["x"][-1]
    arena.finish(2, steps=6, terminated=True, success=True, env_steps=sample.env_steps, ticket=2, group=2, task=0)
    assert_same(arena.trajectory(2), sample)


def test_stored_samples_come_out_as_they_went_in_and_leave_their_neighbours_alone() -> None:
    arena = holding(SAMPLES)
    for block, sample in enumerate(SAMPLES):
        assert_same(arena.trajectory(block), sample)
    arena.store(1, SAMPLES[2])
    arena.store(3, arena.trajectory(0))
    for block, wanted in enumerate([SAMPLES[0], SAMPLES[2], SAMPLES[2], SAMPLES[0]]):
        assert_same(arena.trajectory(block), wanted)


def test_a_sample_that_an_earlier_version_has_saved_has_one_version_for_each_answer() -> None:
    streamed = replace(SAMPLES[0], newer=np.ones(SAMPLES[0].valid.shape, np.int32))
    arena = holding([streamed])
    assert_same(arena.trajectory(0), streamed)
    arena.store(0, replace(streamed, newer=None))
    assert_same(arena.trajectory(0), replace(streamed, newer=np.zeros_like(streamed.newer)))


def test_a_sample_is_read_in_place() -> None:
    arena = holding(SAMPLES)
    sample = arena.trajectory(0)
    for array in (sample.obs["x"], sample.actions, sample.forward_inputs["tokens"], sample.rewards, sample.version):
        assert any(np.shares_memory(array, own) for own in arrays_of(arena))


def test_a_request_stays_until_the_slot_posts_again() -> None:
    arena = in_memory(layout_like(SAMPLES[0], blocks=3, steps=6, slots={"a": 3, "b": 2}))
    keys = np.array([2**62, 5, 0])
    arena.post("a", RequestView(np.array([4, 11, 18]), keys, np.array([True, False, True])))
    arena.post("b", RequestView(np.array([1]), np.array([9]), np.array([False])))
    view = arena.view("a", 3)
    assert (view.entries.tolist(), view.noise_key.tolist()) == ([4, 11, 18], keys.tolist())
    assert view.greedy.dtype == bool
    assert view.greedy.tolist() == [True, False, True]
    assert arena.view("b", 1).entries.tolist() == [1]
    arena.post("a", RequestView(np.array([5]), keys[:1], np.array([False])))
    assert arena.view("a", 1).entries.tolist() == [5]


def test_two_arenas_over_the_same_memory_are_one() -> None:
    layout = layout_like(SAMPLES[0], blocks=4, steps=6)
    memory = bytearray(layout.nbytes)
    writer, reader = Arena(layout, memory), Arena(layout, memoryview(memory))
    for block, sample in enumerate(SAMPLES):
        writer.store(block, sample)
    writer.post("slot", RequestView(np.array([3]), np.array([8]), np.array([True])))
    for block, sample in enumerate(SAMPLES):
        assert_same(reader.trajectory(block), sample)
    assert reader.view("slot", 1).noise_key.tolist() == [8]
