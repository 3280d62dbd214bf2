"""Lock-step runs with and without rows that are reset ahead: bit-equal. And what is refused."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.pipeline.runs import config
from tests.pipeline.test_serial_equivalence import live, tickets

from polyrhythm.envs.base import EnvTraits
from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings
from polyrhythm.envs.latency import LatencySettings
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import env_batch_infos
from polyrhythm.scheduler.records import PrepareEpisodes, StartRows

RESETS = ("resets_ready", "resets_waited", "resets_in_place")


class Watched(GymnasiumSettings):
    """Keeps the first observation of each episode, by seed, in whichever row and thread it was reset."""

    type: Literal["tests.pipeline.test_reset_ahead:Watched"] = "tests.pipeline.test_reset_ahead:Watched"  # type: ignore[assignment]
    begun: ClassVar[dict[int, bytes]] = {}

    def build(self, rows: int) -> GymnasiumBatch:
        batch = super().build(rows)
        reset = batch.reset

        def watched(rows: Any, tasks: Any, seeds: Any) -> None:
            reset(rows, tasks, seeds)
            for row, seed in zip(rows, seeds, strict=True):
                out = {"state": np.zeros((1, 4), np.float32)}
                batch.observe([row], out)
                first = out["state"].tobytes()
                assert Watched.begun.setdefault(int(seed), first) == first

        batch.reset = watched  # type: ignore[method-assign]
        return batch


def run(reset_ahead: int, **changes: Any) -> Any:
    env = {"type": "tests.pipeline.test_reset_ahead:Watched", "id": "CartPole-v1", "max_steps": 40}
    rollout = {**changes.pop("rollout", {}), "reset_ahead": reset_ahead}
    return live(config(env=env, rollout=rollout, **changes))


@pytest.mark.parametrize("rollout", [{}, {"simulators": 2, "rows": 3}, {"env_batches": 2, "rows": 3}])
def test_a_lockstep_run_is_bit_equal(rollout: dict[str, int]) -> None:
    Watched.begun.clear()
    plain, ahead = run(0, rollout=rollout), run(3, rollout=rollout)
    assert tickets(ahead) == tickets(plain)
    wanted, found = plain.weights.read()[1], ahead.weights.read()[1]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    counters = ahead.launcher.hosting.statistics().values()
    ready, waited, in_place = (sum(counts.get(name, 0) for counts in counters) for name in RESETS)
    assert ready + waited + in_place == len(tickets(ahead)[0]) == 30
    assert ready + waited > 0
    assert not any(name in counts for counts in plain.launcher.hosting.statistics().values() for name in RESETS)


def test_a_forecast_across_a_version_is_what_is_granted() -> None:
    """Two simulators, three spares each: where all episodes end before the next begin, no forecast is wrong."""
    pipeline = run(3, rollout={"simulators": 2, "rows": 3}, training={"mini_batch_samples": 6})
    forecast: dict[str, tuple[tuple[int, int], ...]] = {}
    right = 0
    for decision in pipeline.loop.trace:
        for command in decision.commands:
            if isinstance(command, StartRows):
                starts = tuple((grant.ticket.task, grant.ticket.seed) for grant in command.grants)
                assert starts == forecast[command.slot]
                right += len(starts)
        forecast |= {c.slot: c.episodes for c in decision.commands if isinstance(c, PrepareEpisodes)}
    assert right == 18


def refusal(env: dict[str, Any] | None = None, **rollout: Any) -> str:
    settings = config(rollout={"reset_ahead": 2, **rollout}, **({"env": env} if env else {}))
    with pytest.raises(ConfigError) as raised:
        env_batch_infos(settings, settings.env.spec())
    return str(raised.value)


def test_environments_that_cannot_are_refused() -> None:
    section = LatencySettings().model_dump(mode="json")
    settings = config(rollout={"reset_ahead": 2})
    settings = settings.model_copy(update={"env": LatencySettings.model_validate(section)})
    with pytest.raises(ConfigError, match=r"rollout.reset_ahead = 2: the environment steps or resets only whole"):
        env_batch_infos(settings, settings.env.spec())


class Leaving(GymnasiumSettings):
    type: Literal["tests.pipeline.test_reset_ahead:Leaving"]  # type: ignore[assignment]
    traits: ClassVar = EnvTraits(leaves_device=True)


class Undeclared(GymnasiumSettings):
    type: Literal["tests.pipeline.test_reset_ahead:Undeclared"]  # type: ignore[assignment]
    traits: ClassVar = EnvTraits()


def test_an_environment_that_does_not_say_so_is_refused() -> None:
    here = {"id": "CartPole-v1", "max_steps": 40}
    assert "leaves its device for others" in refusal({"type": "tests.pipeline.test_reset_ahead:Leaving", **here})
    found = refusal({"type": "tests.pipeline.test_reset_ahead:Undeclared", **here})
    assert "declare the trait resets_ahead in its settings" in found


def test_more_spares_than_rows_are_refused() -> None:
    with pytest.raises((ConfigError, ValidationError), match="set at most 6"):
        config(rollout={"reset_ahead": 7})
