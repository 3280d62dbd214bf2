"""Measures the work of each kind of station alone, in this process, through the parts that a run uses.

A simulator steps its environment with actions of the policy in its own observations; a generator gathers rows and runs
the pass; the trainer collates samples made of both, computes targets, does micro-batches and optimizer steps, and
publishes its weights, which a module like the generator's then loads. What messages, processes and each other add is
measured in a run (`together`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.errors import StartError
from polyrhythm.pipeline.array_specs import bucket_sizes, largest_batch
from polyrhythm.plugins.planning.alone_parts import SHOWN, RunParts, measure_switch, open_channel, station_profile
from polyrhythm.plugins.planning.alone_simulator import open_simulator
from polyrhythm.plugins.planning.profile import Kind, StationProfile
from polyrhythm.plugins.planning.timing import Budget, Measurements, held_on, sizes
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.specs import Trajectory
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.passes import passes_on
from polyrhythm.training.learner import Learner, Update
from polyrhythm.training.objective import UNSCALED

#: Bytes of samples that the trainer's measurements hold at most.
_SAMPLES_BYTES = 512 * 2**20
#: Chunk steps of the longest sample that is made.
_LONGEST = 256


def measure_alone(parts: RunParts, end: float) -> tuple[dict[Kind, StationProfile], list[str]]:
    """Every station's profile, and a sentence for each measurement that was left out. end: by `time.monotonic`."""
    found: dict[Kind, StationProfile] = {}
    left_out: list[str] = []
    scored = parts.config.scoring is not None
    budget = Budget(end, 3 + scored)
    with open_simulator(parts, left_out) as simulator:
        simulator.observe()
        generator = _Generator(parts, left_out)
        parts.answers = generator.answers()
        found["simulator"] = simulator.measure(budget.part())
    found["generator"] = generator.measure(budget.part())
    del generator
    samples, found["trainer"] = _Trainer(parts, left_out).measure(budget.part())
    if scored:
        found["scorer"] = _score(parts, samples, budget.part())
    return found, left_out


def _score(parts: RunParts, samples: Sequence[Trajectory], budget: Budget) -> StationProfile:
    from polyrhythm.plugins.scoring.reward_function import load_reward, view_of

    scoring, found = parts.config.scoring, Measurements()
    assert scoring is not None
    reward = load_reward(scoring.function, scoring.options)

    def score() -> None:
        with found.time("score", 1):
            reward(view_of(parts.config.env, parts.spec, samples[0], seed=parts.config.seed, evaluation=False))

    found.repeat(score, "score", 1, budget)
    return StationProfile(works=found.works())


# ------------------------------------------------------------ generator


class _Generator:
    """A copy of the policy and what runs its passes."""

    def __init__(self, parts: RunParts, left_out: list[str]) -> None:
        self._parts, self._left_out = parts, left_out
        self._seat = parts.placed.seats[parts.placed.names["generators"][0]]
        self.device = self._seat.torch_device
        before = held_on(self.device)
        self.policy = parts.build(self._seat, "act")
        as_module(self.policy).eval()
        self._resident = max(0, held_on(self.device) - before)
        config = parts.config
        self._buckets = bucket_sizes(config, parts.infos, on_device=parts.placed.serves_on_device)
        self._most = padded(largest_batch(config, parts.infos), self._buckets)
        layout = BatchLayout.of(parts.arena(1, 1))
        rows = max(self._most, SHOWN)
        self._passes = passes_on(torch.device(self.device), layout, rows, config.rollout.graphs)

    def answers(self) -> NDArray[np.void]:
        """Answers to the observations that are shown, as records."""
        self._pass(SHOWN)
        return self._finished.copy()

    def measure(self, budget: Budget) -> StationProfile:
        found, config = Measurements(self.device), self._parts.config
        torch.set_num_threads(self._seat.threads)
        amounts = [size for size in sizes(self._most) if not self._buckets or size in self._buckets]
        if isinstance(config.batching, StreamsBatching):
            self._left_out.append(
                "generator: its passes, since streams answer token by token (batching.type = streams)"
            )
            amounts = []
        budget.parts = len(amounts) + 2
        with torch.inference_mode():
            self._passes.warm_up((self.policy,), self._buckets)
        for rows in amounts:
            if (share := budget.part()).over and rows > amounts[0]:
                self._left_out.append(f"generator: passes from {rows} rows on, as the time was over")
                break
            found.repeat(partial(self._timed_pass, rows, found), "pass", rows, share)
        self._weights(found, budget.part())
        module = as_module(self.policy)
        kept = [*module.parameters(), *module.buffers()]
        measure_switch(self._parts, kept, self.device, found, budget.part(), "generator", self._left_out)
        return station_profile(self.device, self._resident, found)

    def _timed_pass(self, rows: int, found: Measurements) -> None:
        with found.time("pass", rows):
            self._pass(rows)

    def _pass(self, rows: int) -> None:
        """Gather the shown rows, run the pass, wait for its answers."""
        buffer = self._passes.buffer(rows)
        for name, into in buffer.obs.items():
            np.take(self._parts.obs[name], np.arange(rows), 0, into, "wrap")
        buffer.view.noise_key[:] = np.arange(rows) * 7919
        buffer.view.greedy[:] = False
        with torch.inference_mode():
            self._passes.launch(self.policy, rows, 0)
        self._finished = self._passes.finish().answers[:rows]

    def _weights(self, found: Measurements, budget: Budget) -> None:
        """Seconds until a published version is in the module."""
        module, nbytes = as_module(self.policy), self._parts.weights.nbytes
        state = {name: x.detach() for name, x in module.state_dict().items() if name in self._parts.weights.published}
        try:
            with open_channel(self._parts.weights) as weights:
                receiver, version = Receiver(weights, module), 0

                def apply() -> None:
                    nonlocal version
                    weights.publish(version, {name: x.cpu() for name, x in state.items()})
                    with found.time("apply", nbytes):
                        receiver.apply(version)
                    version += 1

                found.repeat(apply, "apply", nbytes, budget)
        except StartError as error:
            self._left_out.append(f"generator: loading weights, since {error}")


# ------------------------------------------------------------ trainer


class _Trainer:
    """A learner, on samples whose observations are the environment's and whose answers are the policy's."""

    def __init__(self, parts: RunParts, left_out: list[str]) -> None:
        self._parts, self._left_out = parts, left_out
        self._seat = parts.placed.seats[parts.placed.names["trainer"][0]]
        self.device = self._seat.torch_device
        config, before = parts.config, held_on(self.device)
        policy = parts.build(self._seat, "train")
        self.learner = Learner(
            policy,
            config.algorithm,
            config.training,
            total_updates=max(1, config.training.versions * config.freshness.sync_interval),
            seed=config.seed,
            sync_interval=config.freshness.sync_interval,
        )
        self._resident = before
        if len(parts.placed.names["trainer"]) > 1:
            left_out.append("trainer: the exchange between its ranks; one rank was measured")

    def measure(self, budget: Budget) -> tuple[list[Trajectory], StationProfile]:
        """The samples, and the profile."""
        # A trainer of its own does micro-batches one after another.
        cold = self._parts.config.launcher == "inline"
        found, learner = Measurements(self.device, cold=cold), self.learner
        torch.set_num_threads(self._seat.threads)
        samples = self._samples()
        steps = sum(sample.steps for sample in samples)
        training = self._parts.config.training
        mini = min(steps, training.minibatch_steps or steps)
        amounts = sizes(min(mini, training.micro_batch_steps or mini))
        budget.parts = len(amounts) + 5
        self._publish(found, budget.part())
        part = samples[: max(1, len(samples) // 4)]
        update = self._prepare(part, found, budget.part())
        if len(part) < len(samples) and not budget.over:
            update = self._prepare(samples, found, budget.part())
        for count in amounts:
            if (share := budget.part()).over and count > amounts[0]:
                self._left_out.append(f"trainer: micro-batches from {count} chunk steps on, as the time was over")
                break
            if count > len(update.batch):
                break
            self._micro_batches(update, count, found, share)
        kept = self.learner.kept_tensors()
        resident = max(0, held_on(self.device) - self._resident)
        measure_switch(self._parts, kept, self.device, found, budget.part(), "trainer", self._left_out)
        learner.optimizer.zero_grad()
        return samples, station_profile(self.device, resident, found)

    def _samples(self) -> list[Trajectory]:
        """Samples of the length that episodes have, at most as many as an update takes and memory allows."""
        parts, config = self._parts, self._parts.config
        length = max(1, round(min(parts.episodes().mean, config.rollout.segment_steps or _LONGEST, _LONGEST)))
        count = config.training.batch_size
        row = sum(x[:1].nbytes for x in parts.obs.values()) + parts.answers.itemsize
        most = max(1, int(_SAMPLES_BYTES // ((length + 1) * row)))
        if count > most:
            self._left_out.append(f"trainer: updates of more than {most} samples, whose memory would be large")
        count = min(count, most)
        arena = parts.arena(count, length)
        rng = np.random.default_rng(0)
        _fill(arena, parts.obs, parts.answers, rng)
        size, chunk = config.groups.size, parts.form.chunk
        for block in range(count):
            head: Mapping[str, int] = {"ticket": block, "group": block // size, "task": 0, "success": block % 2}
            arena.finish(block, steps=length, terminated=1, env_steps=length * chunk, **head)
        return [arena.trajectory(block) for block in range(count)]

    def _prepare(self, samples: Sequence[Trajectory], found: Measurements, budget: Budget) -> Update:
        steps, updates = sum(sample.steps for sample in samples), list[Update]()

        def prepare() -> None:
            with found.time("prepare", steps):
                updates[:] = [Update(self.learner, 0, 1, None, None)]
                updates[0].prepare(samples, own_weights=False)

        found.repeat(prepare, "prepare", steps, budget)
        return updates[0]

    def _micro_batches(self, update: Update, count: int, found: Measurements, budget: Budget) -> None:
        """Micro-batches of this many chunk steps, each followed by the optimizer step of its gradient."""
        learner, order = self.learner, torch.randperm(len(update.batch), generator=torch.Generator().manual_seed(count))

        def micro_batch() -> None:
            learner.optimizer.zero_grad()
            with found.time("micro_batch", count):
                minibatch = update.share.minibatch(update.batch, order[:count], learner.limits)
                metrics = update.accumulate(minibatch, UNSCALED, {})
            with found.time("optimizer_step", 0):
                update.step(metrics)

        found.repeat(micro_batch, "micro_batch", count, budget)

    def _publish(self, found: Measurements, budget: Budget) -> None:
        layout, learner, version = self._parts.weights, self.learner, 0
        try:
            with open_channel(layout) as weights:

                def publish() -> None:
                    nonlocal version
                    with found.time("stage", layout.nbytes):
                        weights.publish(version, dict(learner.publishable()))
                    version += 1

                found.repeat(publish, "stage", layout.nbytes, budget)
        except StartError as error:
            self._left_out.append(f"trainer: publishing weights, since {error}")


def _fill(arena: Arena, obs: Mapping[str, NDArray[Any]], answers: NDArray[np.void], rng: np.random.Generator) -> None:
    """Write the shown observations and their answers, in turn, into all entries; random rewards."""
    layout: ArenaLayout = arena.layout
    entries = layout.blocks * layout.entries
    turn = np.arange(entries) % len(answers)
    for name, into in arena.obs.items():
        np.take(obs[name], turn, 0, into, "wrap")
    arena.answers[:] = answers[turn]
    arena.rewards[:] = rng.standard_normal(arena.rewards.shape)
    arena.valid[:] = True
