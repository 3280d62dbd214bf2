"""A generator lends what frozen parts give, on the host and by the steps of a device's passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.plugins.pretrained.adapted import SmallSettings
from tests.plugins.pretrained.test_adapting import SPEC
from tests.stations.generators import inline_weights
from tests.training.adapted_run import small

from polyrhythm.pipeline.array_specs import answer_specs, shown
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixPool, PrefixSeat, row_specs
from polyrhythm.runtime.messages import Channels
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Request, Serve
from polyrhythm.specs.hashing import row_digests
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.generator import Generator, GeneratorContext, PolicyCopies
from polyrhythm.stations.one_pass import OnePassEngine
from polyrhythm.stations.passes import DevicePasses, Lending, Passes, passes_on

BLOCKS, SLOTS, CPU = 4, {"a": 3, "b": 2}, torch.device("cpu")


class Lender:
    """A generator of the small policy in this thread, and the trainer's pool, which has no slots for the last step."""

    def __init__(self, way: str, device: torch.device = CPU) -> None:
        self.policy, self.said, self.device = small(train="expert").to(device), list[Any](), device
        layout = ArenaLayout(
            BLOCKS, 4, 1, shown(SPEC), answer_specs(SmallSettings(train="expert").form(SPEC), SPEC), SLOTS
        )
        self.arena, rng = in_memory(layout), np.random.default_rng(0)
        for array in self.arena.obs.values():
            array[...] = rng.integers(0, 2, array.shape).astype(array.dtype)
        first = {name: torch.from_numpy(array[:1]).to(device) for name, array in self.arena.obs.items()}
        seat = PrefixSeat(f"lending {way} {id(self)}", shared=False, device=str(device), local=str(device))
        specs = row_specs(self.policy.precompute(first))
        self.trainer = Prefixes(seat, specs, lambda: 3)
        self.trainer.create(BLOCKS * 3, 2**20)
        batch = BatchLayout.of(self.arena)
        passes: Passes = DevicePasses(CPU, batch, 8, captured, self.policy)
        if way != "device":
            passes = passes_on(device, batch, 8, "auto", self.policy)
        weights = inline_weights(as_module(self.policy))
        copies = PolicyCopies(self.policy, self.policy, weights)
        channels = Channels(self.said.append, self.said.extend, self.said.append)
        own = Prefixes(seat, specs, lambda: 3)
        context = GeneratorContext("g", 0, copies, self.arena, channels, "policy small", None, own)
        self.generator = Generator(context, OnePassEngine(context, (4, 8), passes=passes))
        weights.publish(0, self.policy.state_dict())
        for pinned in (False, True):
            self.generator.handle(ApplyWeights("g", 0, pinned))
        while self.generator.work():
            pass

    def serve(self, number: int, *, pinned: bool = False, **entries: list[int]) -> None:
        requests = []
        for slot, rows in entries.items():
            self.arena.post(slot, RequestView(np.array(rows), np.arange(len(rows)) + 7, np.zeros(len(rows), np.bool_)))
            requests.append(Request(slot, "s", number, len(rows), 0, f"address of {slot}", 0.0))
        self.generator.handle(Serve("g", Batch(number, "g", tuple(requests), pinned=pinned)))
        while self.generator.work():
            pass
        assert any(isinstance(event, BatchDone) and event.batch == number for event in self.said)

    def lent(self, entries: list[int]) -> list[bool]:
        """Whether the slot of each entry holds what the policy gives for its observation."""
        pool, at = self.trainer.find(), np.array(entries)
        assert pool is not None
        obs = {name: array[at] for name, array in self.arena.obs.items()}
        held: list[bool] = pool.holds(at, row_digests(obs)).tolist()
        expected = self.policy.precompute({name: torch.from_numpy(x).to(self.device) for name, x in obs.items()})
        for row, entry in enumerate(entries):
            for name, x in expected.items():
                if held[row]:
                    torch.testing.assert_close(pool.arrays[name][entry], x[row], atol=1e-6, rtol=1e-6)
        return held


def captured(run: Any) -> Any:
    run()
    return run


@pytest.mark.parametrize("way", ["host", "device"])
def test_rows_of_training_are_lent_where_there_is_a_slot(way: str) -> None:
    check_lending(way)


def check_lending(way: str, device: torch.device = CPU) -> None:
    lender = Lender(way, device)
    lender.serve(1, a=[2, 9, 14], b=[0, 11])
    assert lender.lent([2, 9, 0, 11]) == [True] * 4
    assert lender.lent([14, 1, 3]) == [False] * 3, "no slot; not answered"
    lender.serve(2, a=[1])
    lender.serve(3, pinned=True, b=[3])
    assert lender.lent([1, 3, 2]) == [True, False, True], "evaluations are not trained on"
    for array in lender.arena.obs.values():
        array[9] = 1 - array[9]
    assert lender.lent([9]) == [False], "the block has another sample"
    lender.serve(4, a=[9, 5])
    assert lender.lent([9, 5]) == [True, True]
    assert lender.generator.statistics()["lent"] == 7


class Order(list[str]):
    """Passes and a lending that say in which order they are used."""

    def capture(self, run: Any) -> Any:
        def replay() -> None:
            self.append("pass")
            run()

        return replay


def test_what_the_device_needs_to_know_is_sent_before_the_pass_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, order = Lender("host"), Order()
    passes = DevicePasses(CPU, BatchLayout.of(lender.arena), 8, order.capture, lender.policy)
    sent, write = Lending.places, PrefixPool.write
    monkeypatch.setattr(Lending, "places", lambda *given: order.append("sent") or sent(*given))
    monkeypatch.setattr(PrefixPool, "write", lambda *given: order.append("written") or write(*given))
    pool, rows = lender.trainer.find(), np.arange(2)
    assert pool is not None
    assert pool.claim(rows + 3).all()
    with torch.inference_mode():
        passes.warm_up([lender.policy], (4,))
        order.clear()
        passes.buffer(4)
        passes.launch(lender.policy, 4, 0, Lending(pool, rows, rows + 3))
        passes.finish()
    assert order == ["sent", "pass", "written"]


def test_a_pass_that_lends_answers_as_one_that_does_not() -> None:
    answers = []
    for lends in (True, False):
        lender = Lender("host")
        if not lends:
            del lender.trainer  # and its pool
        lender.serve(1, a=[2, 9, 1], b=[0, 11])
        answers.append([reply.answers.copy() for reply in lender.said if hasattr(reply, "answers")])
        assert lender.generator.statistics()["lent"] == (5 if lends else 0)
    for first, second in zip(*answers, strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in first.dtype.names)
