"""The named modes, live: with α = 0 all of them train the same samples; with their own α they keep its promise."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.long import long
from tests.pipeline.runs import LOCKSTEP
from tests.pipeline.test_serial_equivalence import live, tickets

from polyrhythm.config.load import merge, validate
from polyrhythm.config.presets import PRESETS, preset
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.scheduler.records import StartUpdate


def run(name, **freshness):
    return live(validate(merge(merge(LOCKSTEP, preset(name, LOCKSTEP)), {"freshness": freshness})))


def lags(pipeline):
    found = LagHistogram()
    for decision in pipeline.loop.trace:
        found.on_decision(decision.now, decision.event, decision.commands)
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="each-update", marks=long(4, "every preset again")), pytest.param(4, id="four-updates")],
)
def reference(request):
    return request.param, run("lockstep", sync_interval=request.param)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "lockstep"])
def test_without_lag_every_preset_trains_what_lockstep_does(name, reference):
    """Guarantee 5: the same tickets, seeds, noise and samples of each version, weights to tolerance."""
    updates, wanted = reference
    found = run(name, max_lag=0.0, sync_interval=updates)
    assert tickets(found)[0] == tickets(wanted)[0]
    versions = [[], []]
    for pipeline, by_version in zip((found, wanted), versions, strict=True):
        for _, version, numbers in tickets(pipeline)[1]:
            by_version.append((version, sorted(numbers)))
    assert versions[0] == versions[1]
    assert set(lags(found).counts) == {0}
    for weight, other in zip(found.weights.read()[1].values(), wanted.weights.read()[1].values(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_keeps_its_own_promise(name):
    pipeline = run(name)
    settings = pipeline.loop.conductor.settings
    found = lags(pipeline)
    found.check_bound(settings.max_lag, settings.bound, clean=True)
    lent = Counter(ticket for _, _, numbers in tickets(pipeline)[1] for ticket in numbers)
    assert set(lent.values()) == {1}
    assert sum(found.counts.values()) == len(lent) == 3 * settings.version_samples


@pytest.mark.parametrize(("max_lag", "bound", "clean"), [(0.5, "sample", False), (0.5, "mean", True)])
def test_samples_that_are_too_old_end_the_run(max_lag, bound, clean):
    found = LagHistogram({"0": 2, "2": 1})
    with pytest.raises(RunHalted, match=rf"max_lag = {max_lag:g} \(bound: {bound}\) is broken"):
        found.check_bound(max_lag, bound, clean=clean)
    found.check_bound(2.0, bound, clean=clean)
    LagHistogram({"0": 1, "5": 1}).check_bound(1.0, "mean", clean=False)


@pytest.mark.parametrize(("streaming", "wanted"), [(True, 10), (False, 40)])
def test_the_first_update_waits_for_the_version_unless_it_streams(streaming, wanted):
    """How many samples had finished when the first update began, of ten each and four a version."""
    changes = {"freshness": {"sync_interval": 4}, "training": {"streaming": streaming, "order": "arrival"}}
    pipeline = live(validate(merge(LOCKSTEP, changes)))
    finished = 0
    for decision in pipeline.loop.trace:
        finished += type(decision.event).__name__ == "SampleFinished"
        if any(isinstance(command, StartUpdate) for command in decision.commands):
            break
    assert finished == wanted
