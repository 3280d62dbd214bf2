"""Passes beside the host: the same answers as passes on it, in order, from memory that is used again. The code of a
device runs here on the CPU, where streams and events do nothing."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch
from tests.stations.generators import SLOTS, Stand, policy
from torch.utils._python_dispatch import TorchDispatchMode

from polyrhythm.errors import RunHalted
from polyrhythm.policies.base import Act
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, VERSION, Reply
from polyrhythm.runtime.spans import IN_BATCH, PASS
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Serve, WeightsApplied
from polyrhythm.specs import ArraySpec
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.passes import DevicePasses, HostPasses, UnfitAct, passes_on

CPU = torch.device("cpu")


class Recording:
    """Stands for CUDA graphs: what is captured is kept and repeated. refuse: capture nothing of so many rows."""

    def __init__(self, refuse=0):
        self.captured, self.replayed, self.refuse, self.asked = [], 0, refuse, 0

    def __call__(self, run):
        self.asked += 1
        if self.asked == self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        run()
        self.captured.append(run)

        def replay():
            self.replayed += 1
            run()

        return replay


def beside(capture=None, rows=16):
    """Makes the passes of a device, on the CPU."""
    return lambda arena: DevicePasses(CPU, BatchLayout.of(arena), rows, capture)


def answers_of(said):
    return [entry for entry in said if isinstance(entry, tuple) and isinstance(entry[0], Reply)]


# ------------------------------------------------------------ memory


MIXED = {
    ACTIONS: ArraySpec((2, 3), "float32"),
    LOGPROB: ArraySpec((2, 3), "float32"),
    VALUE: ArraySpec((), "float32"),
    f"{FORWARD_INPUTS}flag": ArraySpec((), "bool"),
    f"{FORWARD_INPUTS}half": ArraySpec((5,), "float32"),
    f"{FORWARD_INPUTS}step": ArraySpec((), "int64"),
    f"{FORWARD_INPUTS}token": ArraySpec((3,), "uint8"),
    f"{FORWARD_INPUTS}wide": ArraySpec((2,), "float64"),
}
OBS = {
    "image": ArraySpec((3, 5, 3), "uint8"),
    "odd": ArraySpec((7,), "bool"),
    "x": ArraySpec((3,), "float32"),
    "n": ArraySpec((), "int64"),
}


class Mixed(torch.nn.Module):
    """Answers in many dtypes, from all inputs; notes what it is given."""

    def act(self, obs, greedy, noise_key):
        self.given = {name: x.clone() for name, x in obs.items()} | {"greedy": greedy.clone(), "key": noise_key.clone()}
        base = obs["x"].sum(1) + obs["image"].float().mean((1, 2, 3)) + obs["odd"].sum(1) + obs["n"] + greedy
        base = base + (noise_key % 97).float()
        scale = torch.arange(6.0).view(2, 3)
        inputs = {
            "flag": base > 100,
            "half": base.unsqueeze(1).expand(-1, 5).bfloat16(),
            "step": base.int(),
            "token": (base.long() % 200).unsqueeze(1).expand(-1, 3),
            "wide": torch.stack((base, -base), 1),
        }
        return Act(base.view(-1, 1, 1) * scale, base.view(-1, 1, 1) - scale, base.double(), inputs)


def mixed_arena():
    arena = in_memory(ArenaLayout(9, 4, 2, OBS, MIXED, SLOTS))
    rng = np.random.default_rng(3)
    for array in arena.obs.values():
        array[...] = rng.integers(0, 2 if array.dtype == bool else 200, array.shape)
    return arena


def gather(buffer, arena, rng, rows, padding=0):
    entries, keys = rng.integers(0, 45, rows - padding), rng.integers(0, 2**62, rows - padding)
    buffer.put_request(0, RequestView(entries, keys, entries % 2 == 0))
    if padding:
        buffer.pad(rows - padding)
    buffer.gather(arena)
    return buffer


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_both_kinds_of_passes_give_a_policy_the_same_inputs_and_a_slot_the_same_records(rows):
    arena, model = mixed_arena(), Mixed()
    layout, found = BatchLayout.of(arena), []
    for passes in (HostPasses(layout, 9), DevicePasses(CPU, layout, 9, None)):
        gather(passes.buffer(rows), arena, np.random.default_rng(1), rows, padding=rows // 3)
        passes.launch(model, rows, 7)
        found.append((model.given, passes.finish().answers.copy()))
    (inputs, records), (other_inputs, other_records) = found
    assert inputs.keys() == other_inputs.keys() == {*OBS, "greedy", "key"}
    assert all(torch.equal(inputs[name], other_inputs[name]) for name in inputs)
    assert torch.equal(
        inputs["image"][0], torch.from_numpy(arena.obs["image"][np.random.default_rng(1).integers(0, 45)])
    )
    assert records.dtype == other_records.dtype == arena.layout.answer_dtype
    assert records[VERSION].tolist() == [7] * rows
    for name in records.dtype.names:
        assert np.array_equal(records[name], other_records[name]), name
    assert records[f"{FORWARD_INPUTS}half"].any()


@pytest.mark.parametrize("covered", [(), (0,), (1,), (0, 1)], ids=["none", "first", "second", "all"])
def test_observations_on_the_device_are_those_of_the_arena(covered):
    """For batches of two requests, padded, of which some have their observations on the device."""
    arena, model, rng = mixed_arena(), Mixed(), np.random.default_rng(1)
    layout, sizes, entries = BatchLayout.of(arena), (2, 3), rng.integers(0, 45, 5)
    hidden = [n for n in range(45) if n not in entries]
    for passes in (HostPasses(layout, 9), DevicePasses(CPU, layout, 9, None)):
        for _ in range(2):  # the memory is used again
            buffer, first = passes.buffer(7), 0
            for number, size in enumerate(sizes):
                own = entries[first : first + size]
                there = number in covered
                # What is on the device need not be read in the arena.
                view = RequestView(np.full(size, hidden[0]) if there and len(covered) == 2 else own, own, own % 2 == 0)
                buffer.put_request(first, view)
                if there:
                    buffer.put_on_device(first, {n: torch.from_numpy(a[own].copy()) for n, a in arena.obs.items()})
                first += size
            buffer.pad(first)
            buffer.gather(arena)
            passes.launch(model, 7, 7)
            passes.finish()
            for name, array in arena.obs.items():
                assert np.array_equal(model.given[name].numpy(), array[[*entries, entries[0], entries[0]]]), name


class CopiedBytes(TorchDispatchMode):
    """Sizes of the copies within the context."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("covered", [0, 1, 2, 3])
def test_observations_cross_to_the_device_unless_all_are_there(covered):
    arena, layout = mixed_arena(), BatchLayout.of(mixed_arena())
    passes, own = DevicePasses(CPU, layout, 4, None), np.arange(3)
    buffer = passes.buffer(4)
    buffer.put_request(0, RequestView(own, own, own % 2 == 0))
    buffer.put_on_device(0, {name: torch.from_numpy(array[:covered].copy()) for name, array in arena.obs.items()})
    buffer.pad(3)
    buffer.gather(arena)
    with CopiedBytes() as copied:
        passes.launch(Mixed(), 4, 0)
    passes.finish()
    crossed = layout.input_bytes(4) - (layout.obs_bytes(4) if covered == 3 else 0)
    assert copied.sizes[:2] == [crossed] * 2  # to the landing area, and from there to the inputs


def test_the_memory_of_a_pass_is_refilled_only_after_it_has_finished():
    arena, model, rng = mixed_arena(), Mixed(), np.random.default_rng(5)
    passes = DevicePasses(CPU, BatchLayout.of(arena), 9, None)
    first = gather(passes.buffer(3), arena, rng, 3)
    passes.launch(model, 3, 1)
    before = first.obs["x"].copy()
    second = gather(passes.buffer(4), arena, rng, 4)
    assert np.array_equal(first.obs["x"], before)
    passes.launch(model, 4, 2)
    with pytest.raises(AssertionError, match="has not finished"):
        passes.buffer(1)
    answers = passes.finish().answers
    assert answers is first.answers
    assert passes.buffer(3) is first
    assert passes.finish().answers is second.answers
    assert (answers[VERSION].tolist(), second.answers[VERSION].tolist()) == ([1] * 3, [2] * 4)


def test_inputs_and_answers_are_one_piece_of_aligned_memory():
    layout = BatchLayout.of(mixed_arena())
    passes = HostPasses(layout, 9)
    buffer = passes.buffer(5)
    first = buffer.obs["image"].ctypes.data
    arrays = [*buffer.obs.values(), buffer.view.noise_key, buffer.view.greedy]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    assert max(array.ctypes.data + array.nbytes for array in arrays) <= first + layout.input_bytes(5)
    assert all(
        np.shares_memory(array, tensor.numpy())
        for array, tensor in zip(arrays, buffer.inputs[0].values(), strict=False)
    )


# ------------------------------------------------------------ the station


def test_on_the_cpu_a_pass_is_one_unit_of_work():
    stand = Stand()
    assert isinstance(passes_on(CPU, BatchLayout.of(stand.arena), 4, "auto"), HostPasses)
    stand.generator.handle(Serve("g", Batch(8, "g", (stand.request("a", 1),))))
    assert stand.generator.work()
    assert not stand.generator.work()


def test_a_batch_that_is_queued_is_launched_before_the_one_ahead_of_it_is_finished():
    stand = Stand(make_passes=beside())
    asked = [stand.request("a", 7, 30), stand.request("b", 11), stand.request("c", 2, 3, 4)]
    for number, request in enumerate(asked):
        stand.generator.handle(Serve("g", Batch(number, "g", (request,))))
    generator = stand.generator
    assert generator.work()
    assert generator.work()
    assert stand.said == []
    assert generator.current_call()[0] == "pass"
    assert len(generator.pending_work()) == 3
    while generator.work():
        pass
    assert [x.batch for x in stand.said if isinstance(x, BatchDone)] == [0, 1, 2]
    for request, (reply, answers) in zip(asked, answers_of(stand.said), strict=True):
        assert reply.slot == request.slot
        assert np.array_equal(answers[ACTIONS], stand.expected(request).actions.numpy())
        assert np.array_equal(answers[LOGPROB], stand.expected(request).logprob.numpy())
    kinds = ["done" if isinstance(x, BatchDone) else "reply" for x in stand.said]
    assert kinds == ["reply", "done"] * 3
    assert generator.current_call() == ("", 0.0)
    counts = {"passes": 3, "rows": 6, "padding": 0}
    assert generator.statistics().items() >= counts.items()


def test_a_station_whose_device_works_beside_it_waits_for_a_batch_before_it_waits_for_the_pass():
    stand, hour = Stand(make_passes=beside()), 3600.0
    generator, asked = stand.generator, [stand.request("a", 7), stand.request("b", 11), stand.request("c", 2)]
    assert (generator.joined().depth, Stand().generator.joined().depth) == (2, 1)
    assert generator.traits.patience is not None
    assert generator.patience() == 0.0
    generator.handle(Serve("g", Batch(0, "g", (asked[0],))))
    assert generator.work()
    assert generator.patience() == 0.0, "no pass of one row has ended"
    generator.engine._took = {1: hour, 2: 9 * hour}
    assert 0.0 < generator.patience() <= hour / 2
    generator.handle(Serve("g", Batch(1, "g", (asked[1],))))
    assert generator.patience() == 0.0, "it has a batch to launch"
    assert generator.work()
    assert generator.patience() == 0.0, "nothing can be launched behind two"
    launched = time.monotonic()
    assert generator.work()
    assert generator.current_call()[1] >= launched, "it has the device to itself only now that the first has ended"
    generator.handle(Serve("g", Batch(2, "g", (asked[2],))))
    while generator.work():
        pass
    assert generator.patience() == 0.0
    assert [x.batch for x in stand.said if isinstance(x, BatchDone)] == [0, 1, 2]


def test_weights_change_after_the_passes_before_them_and_before_those_behind():
    stand = Stand(make_passes=beside())
    old, new = stand.policy, policy(3)
    stand.weights.publish(1, new.state_dict())
    asked = [stand.request("a", 0), stand.request("b", 1), stand.request("c", 2)]
    for command in (
        Serve("g", Batch(0, "g", (asked[0],))),
        Serve("g", Batch(1, "g", (asked[1],))),
        ApplyWeights("g", 1),
        Serve("g", Batch(2, "g", (asked[2],))),
    ):
        stand.generator.handle(command)
    while stand.generator.work():
        pass
    events = [x for x in stand.said if isinstance(x, BatchDone | WeightsApplied)]
    assert events == [
        BatchDone("g", 0, 0, 0),
        BatchDone("g", 0, 1, 0),
        WeightsApplied("g", 0, 1),
        BatchDone("g", 0, 2, 1),
    ]
    for request, (_, answers), of in zip(asked, answers_of(stand.said), (old, old, new), strict=True):
        stand.policy = of
        assert np.array_equal(answers[LOGPROB], stand.expected(request).logprob.numpy())
        assert answers[VERSION].tolist() == [int(of is not old)]


def test_the_span_of_a_pass_begins_at_its_launch_and_spans_do_not_overlap():
    stand = Stand(make_passes=beside())
    for number, slot in enumerate(("a", "b")):
        stand.generator.handle(Serve("g", Batch(number, "g", (stand.request(slot, 1),))))
    spans, times, generator = [], [time.monotonic()], stand.generator
    for unit in range(4):
        assert generator.work()
        times.append(time.monotonic())
        found = list(generator.spans(*times[-2:]))
        assert [span.kind for span in found] == [PASS, IN_BATCH] * (unit >= 2)
        spans += found
    first, computed, second, _ = spans
    assert times[0] <= first.begin <= times[1]
    assert first.end == times[3]
    assert second.begin == computed.end >= times[2]


# ------------------------------------------------------------ captured passes


def test_the_passes_of_buckets_are_captured_at_warm_up_largest_first_and_replayed_on_static_inputs():
    capture = Recording()
    stand = Stand(buckets=(2, 4, 16), make_passes=beside(capture))
    assert len(capture.captured) == 3
    assert capture.replayed == 0
    asked = [stand.request("a", 0, 3), stand.request("b", 11, 10), stand.request("c", 44, 2, 5, 8)]
    for requests in ([asked[0]], asked[:2], asked):
        replies = stand.serve(*requests)
        wanted = stand.expected(*requests)
        assert np.array_equal(np.concatenate([x[ACTIONS] for _, x in replies]), wanted.actions.numpy())
        assert np.allclose(np.concatenate([x[LOGPROB] for _, x in replies]), wanted.logprob.numpy(), atol=1e-6)
    assert capture.replayed == 3


def test_weights_that_arrive_after_the_capture_are_those_of_the_replay():
    stand = Stand(buckets=(4,), make_passes=beside(Recording()))
    stand.policy = policy(3)
    stand.weights.publish(1, stand.policy.state_dict())
    stand.generator.handle(ApplyWeights("g", 1))
    assert stand.generator.work()
    request = stand.request("c", 4, 5, 6, 7)
    ((_, answers),) = stand.serve(request)
    assert np.array_equal(answers[LOGPROB], stand.expected(request).logprob.numpy())


@pytest.mark.parametrize("refused", [1, 2])
def test_a_policy_that_cannot_be_captured_runs_without_and_is_warned_about_once(refused, caplog):
    capture = Recording(refuse=refused)
    with caplog.at_level(logging.WARNING):
        stand = Stand(buckets=(2, 4, 16), make_passes=beside(capture))
    (record,) = caplog.records
    rows = {1: 16, 2: 4}[refused]
    assert record.getMessage() == (
        f"CategoricalPolicy: passes of {rows} rows cannot be captured as CUDA graphs, so they run without: operation "
        "not permitted when stream is capturing"
    )
    request = stand.request("a", 7, 30)
    ((_, answers),) = stand.serve(request)
    assert np.array_equal(answers[ACTIONS], stand.expected(request).actions.numpy())
    assert capture.replayed == 0


class Unfit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, obs, greedy, noise_key):
        act = policy(1).act(obs, greedy, noise_key)
        return act._replace(value=act.value.unsqueeze(1))


def test_an_output_of_another_form_is_reported_by_both_kinds_of_passes():
    arena = Stand().arena
    layout = BatchLayout.of(arena)
    for passes in (HostPasses(layout, 4), DevicePasses(CPU, layout, 4, Recording())):
        passes.warm_up([Unfit()], (4,))
        gather(passes.buffer(2), arena, np.random.default_rng(0), 2)
        with pytest.raises(
            UnfitAct, match=r"value \[2, 1\] of torch.float32, expected \[2\] of floating-point numbers"
        ):
            passes.launch(Unfit(), 2, 0)


def test_a_station_says_that_act_is_wrong():
    class Wrong(Unfit):
        def state_dict(self):
            return policy(2).state_dict()

    stand = Stand(Wrong(), make_passes=beside())
    stand.generator.handle(Serve("g", Batch(8, "g", (stand.request("a", 1),))))
    with pytest.raises(RunHalted, match=r"policy Wrong: act returned value \[1, 1\]"):
        stand.generator.work()
