"""A trainer of two ranks in processes: the weights of one rank, and one loss of the trainer when a rank fails."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.long import long
from tests.process.runs import LOCKSTEP, children, config, orphaned_folders
from tests.process.test_supervision import at_update, balanced, lost, run

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.pipeline.persistence.checkpoints import STATES, load_policy, newest_run
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler.records import DropReason
from polyrhythm.stations.trainer_states import TrainerStates

#: Several optimizer steps per update, of which a rank has a part.
ONE = merge(LOCKSTEP, {"training": {"epochs": 2, "minibatch_steps": 32, "micro_batch_steps": 8}})
#: What ranks sum beside gradients.
NORMALISED = merge(ONE, {"policy": {"normalize_observations": True}, "algorithm": {"normalize_rewards": True}})


def two(strategy: str, **others: Any) -> dict[str, Any]:
    return {"placement": {"trainer": {"ranks": 2, "strategy": strategy}}, **others}


def train(folder: Path, *words: str) -> None:
    assert main([*words]) == 0
    assert not children()
    assert not orphaned_folders()


def test_a_run_of_two_ranks_gives_the_weights_of_one_and_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """2 sharded ranks, then 1, then 2 with all weights, against 1 all the time."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(NORMALISED))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tmp_path, "train", str(recipe), "launcher=inline", "training.versions=6", "--out", str(whole))
    ranks = "placement.trainer.ranks={} placement.trainer.strategy={} launcher={} training.versions={}".format
    train(tmp_path, "train", str(recipe), *ranks(2, "shard", "local", 2).split(), "--out", str(parts))
    assert TrainerStates(str(parts / STATES)).paths()[-1].name == "trainer-00000002"
    _same(whole, parts, version=2)
    published = json.loads((parts / "summary.json").read_text())["weights"]["trainer"]
    assert {way: one["versions"] for way, one in published.items()} == {"shards": 3}, "each rank its own rows"
    train(tmp_path, "export", str(parts / STATES / "trainer-00000002"), "--out", str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in load_policy(parts)[1].items():
        assert torch.equal(exported[name], tensor), name
    train(tmp_path, "resume", str(parts), *ranks(1, "replicate", "inline", 4).split())
    train(tmp_path, "resume", str(parts), *ranks(2, "replicate", "local", 6).split())
    assert TrainerStates(str(parts / STATES)).paths()[-1].name == "trainer-00000006.pt"
    _same(whole, parts, version=6)
    lines = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    unlike = [abs(line["train/actor/mismatch_kl"]) for line in lines if "train/actor/mismatch_kl" in line]
    assert len(unlike) == 3, "all updates but the first, and those that a resumed run begins with"
    assert max(unlike) < 1e-6, "generators act with the statistics that the trainer has"


def _same(whole: Path, parts: Path, version: int) -> None:
    _, found, trained = load_policy(parts)
    assert trained == version
    saved = newest_run(parts / STATES)
    assert saved is not None
    assert saved.updates == version
    for name, tensor in found.items():
        assert torch.equal(saved.policy[name], tensor), name
    if version == 6:
        for name, tensor in load_policy(whole)[1].items():
            torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("strategy", "number", "reason"),
    [
        ("shard", signal.SIGKILL, "rank 1: was ended by SIGKILL"),
        pytest.param(
            "replicate",
            signal.SIGSTOP,
            "rank 1: sent no heartbeat for 5 s (supervision.heartbeat_s)",
            marks=long(13, "a rank that is stopped in a run"),
        ),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_fails_is_one_loss_of_the_trainer(
    strategy: str, number: signal.Signals, reason: str, tmp_path: Path
) -> None:
    fail = at_update(3, lambda pipeline: os.kill(process_ids(pipeline.launcher.hosting)["trainer-rank1"], number))
    pipeline = run(
        tmp_path,
        versions=8,
        during=fail,
        training={"versions": 8},
        supervision={"heartbeat_s": 5.0 if number == signal.SIGSTOP else 60.0},
        **two(strategy),
    )
    assert [event.reason for event in lost(pipeline) if event.station == "trainer"] == [reason]
    ledger = pipeline.loop.conductor.ledger
    if strategy == "replicate":
        assert balanced(pipeline, 64)
    else:  # a version may have been published before its state was written
        assert (ledger.imbalance, set(ledger.dropped) - {DropReason.ROLLBACK}) == (0, set())
    assert {path.name for path in (tmp_path / "logs").glob("trainer*")} == {
        *("trainer.0.log", "trainer-rank1.0.log", "trainer.1.log", "trainer-rank1.1.log")
    }


@long(8, "ranks that wait in a collective")
def test_ranks_that_wait_for_one_in_a_collective_are_the_loss_of_the_trainer(tmp_path: Path) -> None:
    """Rank 1 hangs in its update and rank 0 in the sum of their gradients, both with heartbeats; they are found by
    supervision.update_s, and others go on."""
    marker = tmp_path / "hung"
    policy = {"type": "tests.process.policies:HangingSettings", "marker": str(marker)}
    limits = {"update_s": 6.0, "heartbeat_s": 60.0}
    pipeline = run(
        tmp_path, versions=3, training={"versions": 3}, policy=policy, supervision=limits, **two("replicate")
    )
    assert marker.exists()
    (reason,) = [event.reason for event in lost(pipeline) if event.station == "trainer"]
    call = r"update for \d+\.\d s(, in hangs \(.*policies\.py, line \d+\))?"
    assert re.fullmatch(rf"rank [01]: has been in one {call} \(supervision\.update_s\)", reason)
    assert balanced(pipeline, 24)


#: Each starts a trainer of two ranks twice.
LONG = long(20, "ranks that end as they are built, save or publish")


@pytest.mark.parametrize("phase", [pytest.param("save", marks=LONG), pytest.param("prepare", marks=LONG)])
def test_a_rank_that_ends_between_updates_is_one_loss_of_the_trainer(phase: str, tmp_path: Path) -> None:
    """As its ranks save their parts, and as they publish them."""
    marker = tmp_path / "ended"
    policy = {"type": "tests.process.policies:EndingSettings", "marker": str(marker), "phase": phase}
    pipeline = run(tmp_path, versions=4, policy=policy, **two("shard"))
    assert marker.exists()
    assert [event.reason for event in lost(pipeline)] == ["rank 1: was ended by SIGKILL"]
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, set(ledger.dropped) - {DropReason.ROLLBACK}) == (0, set())
    assert pipeline.loop.conductor.versions.applied == 4


@LONG
def test_a_rank_that_fails_at_its_start_is_started_again_with_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "ended"
    policy = {"type": "tests.process.policies:EndingSettings", "marker": str(marker), "phase": "build"}
    with caplog.at_level(logging.ERROR):
        pipeline = run(tmp_path, versions=2, training={"versions": 2}, policy=policy, **two("replicate"))
    assert marker.exists()
    assert lost(pipeline) == [], "it was not there yet"
    assert balanced(pipeline, 16)
    told = [record.getMessage().splitlines()[0] for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("trainer rank 1: RuntimeError: this rank has no room; starting it again (failure 1 of ")


def test_a_run_of_one_process_has_one_rank() -> None:
    from polyrhythm.errors import ConfigError
    from polyrhythm.pipeline.validation.check import validate_run

    with pytest.raises(ConfigError, match=r"placement.trainer.ranks = 2: with launcher = inline there is one process"):
        validate_run(config(ONE, launcher="inline", **two("replicate")))
