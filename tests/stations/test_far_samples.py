"""A trainer whose samples lie on another host: it fetches them in its work, before the first step of their update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.plugins.cluster.test_hosts import SlowLink
from tests.runtime.arenas import holding
from tests.stations.test_trainer import LEND, Stand
from tests.training.toy import ToyPolicy, collect, same, weights

from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.plugins.cluster.hosts.memory import OtherHosts
from polyrhythm.plugins.ranks.collectives import deal, share_of
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Unobeyable
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import PublishWeights
from polyrhythm.stations.trainer_io import FarSamples
from polyrhythm.training.batch import Share
from polyrhythm.training.ranks import Ranks

FAR = replace(LEND, payload_ids=("b/0", "b/1", "2"))


class Apart:
    """A trainer on host a; the third sample lies there, the others on b, over a link of so many bytes per second."""

    def __init__(self, rate: float = 1e6) -> None:
        samples = collect(ToyPolicy(), lengths=(3, 4, 2))
        self.far = holding(samples)
        self.link, layout = SlowLink(self.far, rate), self.far.layout
        client = DataClient("b", lambda _: self.link)
        arena = Arena(layout, bytearray(layout.nbytes), OtherHosts(layout, "a", {}, {"b": client}))
        arena.store(2, samples[2])
        self.stand = Stand(arena=arena)
        self.trainer = self.stand.trainer


def test_samples_are_fetched_in_a_call_that_supervision_sees() -> None:
    apart = Apart()
    calls = []
    apart.link.on_answer = lambda: calls.append(apart.trainer.current_call()[0])
    apart.trainer.handle(FAR)
    assert (apart.link.now, calls) == (0.0, []), "hearing a command asks no other host"
    assert apart.trainer.work()
    assert calls == ["fetch", "fetch"]
    assert list(apart.trainer.spans(0.0, 1.0)) == []
    assert apart.trainer.current_call()[0] == ""


def test_an_update_on_fetched_samples_is_that_on_samples_that_lie_here() -> None:
    apart, near = Apart(), Stand()
    near.do(LEND)
    apart.stand.do(FAR)
    assert same(weights(apart.stand.policy), weights(near.policy))
    assert apart.stand.said[-1] == near.said[-1]
    times = {name for name in near.said[0].values if name.startswith("time/")}
    values = [{k: v for k, v in stand.said[0].values.items() if k not in times} for stand in (apart.stand, near)]
    assert values[0] == values[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_fetches_the_observations_of_its_own_samples_alone(number: int) -> None:
    """Of the others it fetches what the deal and the metrics need: the deal is by group and length of all."""

    class OneOfTwo(Ranks):
        rank, size = number, 2

        def share(self, groups: Sequence[int], steps: Sequence[int], samples: int = 0) -> Share:
            return share_of(groups, steps, self.rank, self.size, samples)

    apart = Apart()
    samples = [apart.far.trajectory(block) for block in (0, 1)]
    arena = apart.stand.arena
    learner = SimpleNamespace(ranks=OneOfTwo(), training=SimpleNamespace(step_samples=0))
    far = FarSamples(arena, learner)  # type: ignore[arg-type]
    far.add(FAR)
    far.fetch_next()
    groups, steps = zip(*((s.group, s.steps) for s in [*samples, arena.read("2")]), strict=True)
    own = deal(groups, steps, 2)[number]
    assert own != [0, 1, 2]
    for index, sample in enumerate(samples):
        found = arena.read(f"b/{index}")
        assert (found.ticket, found.group, found.steps) == (sample.ticket, sample.group, sample.steps)
        np.testing.assert_array_equal(found.version, sample.version)
        for name, array in sample.obs.items():
            assert np.array_equal(found.obs[name], array) == (index in own)


def test_what_is_published_first_does_not_wait_for_samples() -> None:
    apart = Apart()
    apart.trainer.handle(PublishWeights("t", 0))
    apart.trainer.handle(FAR)
    assert apart.trainer.work()
    assert apart.link.now == 0.0
    assert apart.stand.channel.newest == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda apart: apart.far.head.fill(0), "host b: block 0 holds no finished sample"),
        (lambda apart: apart.far.head.__setitem__((1, 4), 9), r"the samples of tickets \[1\] are not there any more"),
    ],
    ids=["gone", "another"],
)
def test_an_update_whose_samples_are_not_there_is_refused(spoil, why) -> None:
    apart = Apart()
    spoil(apart)
    apart.trainer.handle(FAR)
    apart.trainer.handle(PublishWeights("t", 1))
    with pytest.raises(Unobeyable, match=why) as refused:
        apart.trainer.work()
    assert refused.value.command == FAR
    assert not apart.trainer.work(), "nothing follows: main replaces it"
    assert apart.stand.said == []


def test_a_host_that_does_not_answer_refuses_the_update() -> None:
    apart = Apart(rate=1.0)
    apart.trainer.handle(FAR)
    with pytest.raises(Unobeyable, match="host b has not answered for 5 s"):
        apart.trainer.work()


def test_what_cannot_be_fetched_is_refused_when_it_is_heard() -> None:
    for payload_ids in (("b/0", "b/1", "1"), ("b/0", "b/1", "b/3"), ("b/0", "b/1", "x")):
        with pytest.raises(UnfitMessage, match="t cannot train on"):
            Apart().trainer.handle(replace(FAR, payload_ids=payload_ids))
    with pytest.raises(UnfitMessage, match="t cannot train on"):
        Stand().trainer.handle(FAR)
