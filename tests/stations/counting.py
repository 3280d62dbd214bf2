"""A real, tiny environment whose every number can be foretold, and a bench to put a simulator on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import StepResult
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, VERSION, Reply
from polyrhythm.scheduler import records
from polyrhythm.scheduler.rollout.rows import shard
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, Aggregate, ArraySpec, EnvSpec, Task, Trajectory
from polyrhythm.stations.simulator.slot import SlotIdentity, StepSettings
from polyrhythm.stations.simulator.station import Simulator

MAX_STEPS = 12


class Counting:
    """Observation: (seed, steps done, sum of actions), then zeros up to `features` numbers.

    An episode ends, with success, after `seed % 100` steps. The reward of a step is its action. `stepped` counts the
    steps of each row, no-ops included. A row whose seed is in `broken` raises at its second step, one in `unborn` at
    reset.
    """

    def __init__(
        self,
        rows: int,
        *,
        reset_rows: bool = True,
        step_rows: bool = True,
        features: int = 3,
        metrics: Mapping[str, Aggregate] | None = None,
    ) -> None:
        self.rows = rows
        self.spec = EnvSpec(
            observation={"x": ArraySpec((features,), "float32")},
            action=ActionSpec("continuous", 1, low=(-9.0,), high=(9.0,)),
            tasks=(Task("a", "do a"), Task("b", "do b")),
            max_steps=MAX_STEPS,
            reset_rows=reset_rows,
            step_rows=step_rows,
            metrics=metrics or {},
        )
        self.state = np.zeros((rows, 3), np.float32)
        self.stepped = np.zeros(rows, np.int64)
        self.resets: list[tuple[int, int, int]] = []
        self.reset_calls = self.observe_calls = 0
        self.broken: set[int] = set()
        self.unborn: set[int] = set()
        self.closed = False

    def reset(self, rows: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> None:
        assert self.spec.reset_rows or list(rows) == list(range(self.rows))
        self.reset_calls += 1
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

    def observe(self, rows: Sequence[int], out: Mapping[str, NDArray[np.generic]]) -> None:
        self.observe_calls += 1
        out["x"][: len(rows), 3:] = 0
        out["x"][: len(rows), :3] = self.state[np.asarray(rows)]

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


def answers(chunk: int) -> dict[str, ArraySpec]:
    """What a policy with one-number actions and one forward input answers a row."""
    return {
        ACTIONS: ArraySpec((chunk, 1), "float32"),
        LOGPROB: ArraySpec((chunk, 1), "float32"),
        VALUE: ArraySpec((), "float32"),
        FORWARD_INPUTS + "k": ArraySpec((), "int64"),
    }


class Bench:
    """A simulator with one env batch of `rows`, its arena of `blocks`, and everything that it emitted."""

    def __init__(
        self,
        rows: int,
        *,
        sharding: str | tuple[int, ...] = "whole",
        settings: StepSettings | None = None,
        env: Counting | None = None,
        blocks: int = 0,
    ) -> None:
        self.env = env or Counting(rows)
        self.events: list[records.Event] = []
        settings = settings or StepSettings(1)
        info = shard("e", rows, sharding, [], reset_rows=self.env.spec.reset_rows)
        layout = ArenaLayout(
            blocks=blocks or 2 * rows,
            steps=settings.sample_steps(MAX_STEPS),
            chunk=settings.chunk,
            obs={**self.env.spec.observation, INSTRUCTION: ArraySpec((), "int64"), PROGRESS: ArraySpec((), "float32")},
            answers=answers(settings.chunk),
            slots={slot.slot: slot.rows for slot in info.slots},
        )
        self.arena, self.pool = in_memory(layout), InFlight(layout)
        self.simulator = Simulator(SlotIdentity("s", 0, "s.0.0", self._emit), info, self.env, settings, self.arena)

    def _emit(self, event: records.Event) -> None:
        self.events.append(event)
        self.pool.on_event(event)

    def start(self, *grants: tuple[int, records.Ticket], slot: str = "e/0", resume: bool = False) -> None:
        command = records.StartRows("s", slot, tuple(records.Grant(row, t, resume) for row, t in grants))
        self.simulator.handle(self.pool.assign(command))

    def run(self) -> list[records.Event]:
        """Work until there is none; the events of it."""
        self.events.clear()
        while self.simulator.work():
            pass
        return list(self.events)

    def answer(
        self,
        event: records.Event,
        version: int = 0,
        value: Callable[[int], float] = float,
        spoil: Callable[[NDArray[Any]], None] | None = None,
    ) -> None:
        """Reply to a request: each row's action is value(its place), repeated over the chunk. spoil: changes it."""
        assert isinstance(event, records.RequestArrived)
        found = np.zeros(event.rows, self.arena.layout.answer_dtype)
        values = np.array([value(i) for i in range(event.rows)], np.float32)
        found[ACTIONS] = values[:, None, None]
        found[LOGPROB] = -values[:, None, None]
        found[VALUE] = values * 10
        found[FORWARD_INPUTS + "k"] = np.arange(event.rows)
        found[VERSION] = version
        if spoil is not None:
            spoil(found)
        self.simulator.deliver(Reply(event.reply_to, event.slot, event.sequence, found))

    def view(self, event: records.Event) -> RequestView:
        assert isinstance(event, records.RequestArrived)
        return self.arena.view(event.slot, event.rows)

    def shown(self, event: records.Event, name: str = "x") -> list[Any]:
        """What the request shows of an array, active rows only."""
        return self.arena.obs[name][self.view(event).entries].tolist()  # type: ignore[no-any-return]

    def sample(self, event: records.Event) -> Trajectory:
        """The finished sample, in place."""
        assert isinstance(event, records.SampleFinished)
        return self.arena.trajectory(int(event.payload_id))
