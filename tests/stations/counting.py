"""A real, tiny environment whose every number can be foretold, and a bench to put a simulator on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import StepResult
from polyrhythm.flow import records
from polyrhythm.flow.sharding import shard
from polyrhythm.runtime.messages import ACTIONS, LOGPROB, VALUE, Reply
from polyrhythm.runtime.payloads import InlinePayloads, RequestView
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.stations.simulator import Simulator
from polyrhythm.stations.slot import StepSettings

MAX_STEPS = 12


class Counting:
    """Observation: (seed, steps done, sum of actions). An episode ends, with success, after `seed % 100` steps.

    The reward of a step is its action. `stepped` counts the steps of each row, no-ops included. A row whose seed is in
    `broken` raises at its second step, one in `unborn` at reset.
    """

    def __init__(self, rows: int, *, reset_rows: bool = True, step_rows: bool = True) -> None:
        self.rows = rows
        self.spec = EnvSpec(
            observation={"x": ArraySpec((3,), "float32")},
            action=ActionSpec("continuous", 1, low=(-9.0,), high=(9.0,)),
            tasks=(Task("a", "do a"), Task("b", "do b")),
            max_steps=MAX_STEPS,
            reset_rows=reset_rows,
            step_rows=step_rows,
        )
        self.state = np.zeros((rows, 3), np.float32)
        self.stepped = np.zeros(rows, np.int64)
        self.resets: list[tuple[int, int, int]] = []
        self.observe_calls = 0
        self.broken: set[int] = set()
        self.unborn: set[int] = set()
        self.closed = False

    def reset(self, rows: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> None:
        assert self.spec.reset_rows or list(rows) == list(range(self.rows))
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            if seed in self.unborn:
                raise RuntimeError(f"no state for seed {seed}")
            self.resets.append((row, task, seed))
            self.state[row] = (seed, 0, 0)

    def step(self, rows: Sequence[int], actions: NDArray[np.generic]) -> StepResult:
        assert self.spec.step_rows or list(rows) == list(range(self.rows))
        picked = np.asarray(rows)
        for row in picked:
            if int(self.state[row, 0]) in self.broken and self.state[row, 1] >= 1:
                raise RuntimeError(f"row {row} fell over")
        self.stepped[picked] += 1
        self.state[picked, 1] += 1
        self.state[picked, 2] += actions[:, 0]
        ended = self.state[picked, 1] >= self.state[picked, 0] % 100
        never = np.zeros(len(picked), bool)
        return StepResult(actions[:, 0].astype(np.float32), ended, never, ended)

    def observe(self, rows: Sequence[int], out: dict[str, NDArray[np.generic]]) -> None:
        self.observe_calls += 1
        out["x"][: len(rows)] = self.state[np.asarray(rows)]

    def expert_actions(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self.state[np.asarray(rows), 1:2] + 1

    def close(self) -> None:
        self.closed = True


def ticket(number: int, length: int, *, version: int = 0, evaluation: str = "", task: int = 0) -> records.Ticket:
    """A ticket whose episode takes `length` env steps. Its seed is length + 100·number."""
    return records.Ticket(
        number=number,
        group=number,
        task=task,
        instruction=task,
        seed=length + 100 * number,
        noise=7000 + number,
        version=version,
        evaluation=evaluation,
    )


class Bench:
    """A simulator with one env batch of `rows`, its payloads, and everything that it emitted."""

    def __init__(
        self,
        rows: int,
        *,
        sharding: str | tuple[int, ...] = "whole",
        settings: StepSettings | None = None,
        env: Counting | None = None,
    ) -> None:
        self.env = env or Counting(rows)
        self.events: list[records.Event] = []
        self.payloads = InlinePayloads()
        self.chunk = (settings or StepSettings(1)).chunk
        info = shard("e", rows, sharding, [], reset_rows=self.env.spec.reset_rows)
        self.simulator = Simulator(
            "s", 0, [(info, self.env)], settings or StepSettings(1), self.payloads, self.events.append
        )

    def start(self, *grants: tuple[int, records.Ticket], slot: str = "e/0", resume: bool = False) -> None:
        given = tuple(records.Grant(row, t, resume) for row, t in grants)
        self.simulator.handle(records.StartRows("s", slot, given))

    def run(self) -> list[records.Event]:
        """Work until there is none; the events of it."""
        self.events.clear()
        while self.simulator.work():
            pass
        return list(self.events)

    def answer(self, event: records.Event, version: int = 0, value: Callable[[int], float] = float) -> None:
        """Reply to a request: each row's action is value(its place), repeated over the chunk."""
        assert isinstance(event, records.RequestArrived)
        n = event.rows
        actions = np.array([value(i) for i in range(n)], np.float32)[:, None, None].repeat(self.chunk, 1)
        arrays: dict[str, NDArray[Any]] = {
            ACTIONS: actions,
            LOGPROB: -actions,
            VALUE: actions[:, 0, 0] * 10,
            "forward_inputs.k": np.arange(n),
        }
        self.simulator.deliver(Reply(event.slot, event.sequence, version, arrays))

    def view(self, event: records.Event) -> RequestView:
        assert isinstance(event, records.RequestArrived)
        return self.payloads.view(event.handle)

    def shown(self, event: records.Event, name: str = "x") -> list[Any]:
        """What the request shows of an array, active rows only."""
        view = self.view(event)
        return view.arrays[name][view.index].tolist()  # type: ignore[no-any-return]
