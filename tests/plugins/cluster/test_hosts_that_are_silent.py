"""What main reads of other hosts for its files, where one of them does not answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.persistence.snapshot import SampleHandover, read_newest, reader_of
from polyrhythm.plugins.cluster.hosts.client import HostSilent
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs


class Silent:
    """Payloads on a host that never answers; how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def read(self, payload_id: str) -> Any:
        self.asked += 1
        raise HostSilent("host b has not answered for 5 s")


@pytest.mark.parametrize("writer_first", [True, False])
def test_after_a_sample_that_cannot_be_read_nothing_waits_for_its_host(writer_first: bool) -> None:
    """Each wait for it takes seconds, in which main does nothing else."""
    payloads = Silent()
    handover = SampleHandover(payloads, [str(block) for block in range(9)])  # type: ignore[arg-type]
    reading = handover.samples()
    if writer_first:
        with pytest.raises(HostSilent):
            next(reading)
        reading = handover.samples()
    for block in range(1, 9):
        handover.copy_now(block)
        assert not handover.is_pending(block)
    assert payloads.asked == 1
    with pytest.raises(HostSilent):
        next(reading)
    assert payloads.asked == 1


class Far(InlineWeights):
    """As where they may lie on another host; `silent`: which does not answer."""

    fetches = True

    def __init__(self, layout: WeightsLayout) -> None:
        super().__init__(layout)
        self.reads, self.silent = 0, False

    def read(self, version: int | None = None) -> Any:
        self.reads += 1
        if self.silent:
            raise HostSilent("host b has not answered for 5 s")
        return super().read(version)


STATE = {"w": torch.ones(2)}


def published() -> Far:
    weights = Far(WeightsLayout.of(weight_specs(STATE)))
    for version in (0, 1):
        weights.publish(version, STATE)
    return weights


def test_a_version_of_another_host_is_read_by_who_writes_it() -> None:
    weights = published()
    version, read = reader_of(weights, 0)
    assert (version, weights.reads) == (0, 0), "main asks no host for gigabytes"
    assert torch.equal(read()["w"], STATE["w"])
    weights.publish(2, STATE)
    with pytest.raises(OSError, match="version 0 was replaced by 2 before it was fetched"):
        read()
    weights.fetches = False
    assert reader_of(weights, 0)[0] == 2, "in memory the newest is read at once instead"


def test_the_end_of_a_run_is_not_hidden_by_weights_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    weights = published()
    read = read_newest(weights, "policy.pt", needed=True)
    assert read is not None
    assert read[0] == 1
    weights.silent = True
    assert read_newest(weights, "policy.pt", needed=False) is None
    words = "policy.pt is not written: host b has not answered for 5 s, and the newest weights lie there; resume"
    assert words in caplog.text
    with pytest.raises(RunHalted, match=words):
        read_newest(weights, "policy.pt", needed=True)
