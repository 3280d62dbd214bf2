"""Measures the work of each kind of station alone, in this process, through the parts that a run uses.

A simulator steps its environment with actions of the policy in its own observations; a generator gathers rows and runs
the pass; the trainer collates samples made of both, computes targets, does micro-batches and optimizer steps, and
publishes its weights, which a module like the generator's then loads. What messages, processes and each other add is
measured in a run (`together`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.errors import RunHalted, StartError
from polyrhythm.pipeline.array_specs import arena_layout, bucket_sizes, env_batch_infos, largest_batch, step_settings
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.lease.offload import open_store
from polyrhythm.plugins.planning.profile import Episodes, Kind, StationProfile
from polyrhythm.plugins.planning.timing import FEWEST, Budget, Measurements, held_on, sizes
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.runtime.messages import ACTIONS
from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.specs import Trajectory, WeightsLayout
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.generator_factory import PolicyFactory
from polyrhythm.stations.passes import passes_on
from polyrhythm.stations.simulator.chunk import stepper, whole_batch
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv
from polyrhythm.training.learner import Learner, Update
from polyrhythm.training.objective import UNSCALED

#: Rows of observations that passes and samples are made of.
_SHOWN = 64
#: Bytes of samples that the trainer's measurements hold at most.
_SAMPLES_BYTES = 512 * 2**20
#: Seeds tried for an episode, since some may be refused.
_SEEDS = 32
#: Chunk steps of the longest sample that is made.
_LONGEST = 256


class Alone:
    """Measures the recipe's stations, one at a time. The configuration has passed `validate_run`."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.spec = config, env_settings(config).spec()
        self.form: PolicyForm = policy_settings(config).form(self.spec)
        self.infos = env_batch_infos(config, self.spec)
        self.placed = place(config)
        layout = arena_layout(config, self.spec, self.infos, self.form)
        self.layout = replace(layout, blocks=1, steps=1)
        self.weights = WeightsLayout.of(self.form.published)
        self.factory = PolicyFactory(config.policy.model_dump(mode="json"), self.spec, config.seed)
        self.obs: dict[str, NDArray[Any]] = {}
        self.answers: NDArray[np.void] = np.zeros(0, self.layout.answer_dtype)
        self.ended: list[int] = []  # chunk steps of whole episodes
        self.row_steps = 0  # chunk steps of all rows
        self.chunk = self._env_steps()

    def stations(self, end: float) -> tuple[dict[Kind, StationProfile], list[str]]:
        """Every station's profile, and a sentence for each measurement that was left out. end: by `time.monotonic`."""
        found: dict[Kind, StationProfile] = {}
        left_out: list[str] = []
        scored = self.config.scoring is not None
        budget = Budget(end, 3 + scored)
        with _simulator(self, left_out) as simulator:
            simulator.observe()
            generator = _Generator(self, left_out)
            self.answers = generator.answers()
            found["simulator"] = simulator.measure(budget.part())
        found["generator"] = generator.measure(budget.part())
        del generator
        learner, found["trainer"] = _Trainer(self, left_out).measure(budget.part())
        if scored:
            found["scorer"] = self._scorer(learner, budget.part())
        return found, left_out

    def episodes(self) -> Episodes:
        """Lengths of the episodes seen; the mean counts those that have not ended, and is at most the longest."""
        longest = max(1, -(-self.spec.max_steps // self.chunk))
        if not self.ended:
            return Episodes(mean=longest, longest=longest, chunk=self.chunk)
        mean = min(longest, max(1.0, self.row_steps / len(self.ended)))
        return Episodes(mean=mean, deviation=pstdev(self.ended), longest=longest, chunk=self.chunk)

    def build(self, seat: Resources, role: Role) -> Policy:
        """The policy as a station on this seat builds it."""
        torch.set_num_threads(seat.threads)
        return self.factory.build(seat.torch_device, role, self.weights)

    def arena(self, blocks: int, steps: int) -> Arena:
        return in_memory(replace(self.layout, blocks=blocks, steps=steps))

    def _env_steps(self) -> int:
        """Env steps of a chunk step."""
        chunk = 1 if self.spec.chunk else self.form.chunk
        return max(1, chunk * self.config.rollout.action_repeat)

    def _scorer(self, samples: Sequence[Trajectory], budget: Budget) -> StationProfile:
        from polyrhythm.plugins.scoring.reward_function import load_reward, view_of

        scoring, found = self.config.scoring, Measurements()
        assert scoring is not None
        reward = load_reward(scoring.function, scoring.options)

        def score() -> None:
            with found.time("score", 1):
                reward(view_of(self.config.env, self.spec, samples[0], seed=self.config.seed, evaluation=False))

        found.repeat(score, "score", 1, budget)
        return StationProfile(works=found.works())


def _station(device: str, held: int, found: Measurements) -> StationProfile:
    """The profile of a station that keeps so many bytes on its device."""
    if device == CPU:
        return StationProfile(device="cpu", host=held, works=found.works())
    return StationProfile(device="cuda", resident=held, works=found.works())


# ------------------------------------------------------------ simulator


@contextmanager
def _simulator(alone: Alone, left_out: list[str]) -> Iterator[_Simulator]:
    before = held_on(CPU)
    env = env_settings(alone.config).build(alone.config.rollout.rows)
    try:
        yield _Simulator(alone, GuardedEnv(env), before, left_out)
    except EnvFault as fault:
        raise RunHalted(
            f"profile: {fault}{fault.place}; fix the environment (`polyrhythm check` tries its whole contract)"
        ) from fault
    finally:
        env.close()


class _Simulator:
    """One env batch, whose rows step with the policy's actions and begin anew where an episode ends."""

    def __init__(self, alone: Alone, env: GuardedEnv, before: int, left_out: list[str]) -> None:
        self._alone, self._env, self._before, self._left_out = alone, env, before, left_out
        config, spec = alone.config, alone.spec
        settings = step_settings(config, alone.form.chunk, whole=bool(spec.chunk))
        settings.check(spec)
        self._step = env.step if spec.step_rows else whole_batch(env)
        self._step_chunk = stepper(spec, settings.action_repeat)
        self._elapsed = np.zeros(env.rows, np.int64)  # env steps
        self._steps = np.zeros(env.rows, np.int64)  # chunk steps
        self._seed, self._turn = 0, 0
        self._arrays = {name: np.zeros((env.rows, *a.shape), a.dtype) for name, a in spec.observation.items()}
        self._found = Measurements()

    def observe(self) -> None:
        """Begin an episode in each row, and keep the observations as those of passes and samples."""
        rows = np.arange(self._env.rows)
        self._reset(rows)
        self._observe(rows)
        shown = dict(self._arrays)
        tasks = len(self._alone.spec.tasks)
        for name, array in self._alone.layout.obs.items():
            if name not in shown:  # the instruction and the progress
                values = np.arange(self._env.rows) % tasks if array.dtype == "int64" else np.zeros(self._env.rows)
                shown[name] = values.astype(array.dtype)
        self._alone.obs = {name: np.resize(x, (_SHOWN, *x.shape[1:])) for name, x in shown.items()}

    def measure(self, budget: Budget) -> StationProfile:
        amounts = sizes(self._env.rows) if self._alone.spec.step_rows else [self._env.rows]
        if not self._alone.spec.step_rows:
            self._left_out.append("simulator: other numbers of rows, since the environment steps only whole batches")
        budget.parts = len(amounts)
        for rows in amounts:
            self._found.repeat(partial(self._chunk_step, rows), "step", rows, budget.part())
        self._reset(np.arange(self._env.rows))
        held, found = max(0, held_on(CPU) - self._before), self._found
        return StationProfile(host=held, works=found.works(), awake=found.awake)

    def _chunk_step(self, count: int) -> None:
        """Measure a chunk step of the first rows, observations included. Rows that end are reset after it."""
        alone, rows = self._alone, np.arange(count)
        answers = alone.answers
        actions = answers[ACTIONS][(rows + self._turn) % len(answers)]
        self._turn += count
        left = alone.spec.max_steps - self._elapsed[rows]
        with self._found.time("step", count):
            result = self._step_chunk(self._step, rows, actions, left)
            self._observe(rows)
        self._elapsed[rows] += result.steps
        self._steps[rows] += 1
        alone.row_steps += count
        over = rows[result.terminated | result.truncated]
        alone.ended += self._steps[over].tolist()
        if len(over):
            self._reset(over if alone.spec.reset_rows else np.arange(self._env.rows))

    def _reset(self, rows: NDArray[np.intp]) -> None:
        """Begin episodes, and measure it; for refused ones the next seeds are tried."""
        tasks = len(self._alone.spec.tasks)
        self._elapsed[rows] = self._steps[rows] = 0
        with self._found.time("reset", len(rows)):
            for _ in range(_SEEDS):
                seeds = list(range(self._seed, self._seed + len(rows)))
                self._seed += len(rows)
                self._env.reset(list(map(int, rows)), [seed % tasks for seed in seeds], seeds)
                rows = np.array(sorted(self._env.failed), np.intp)
                if not len(rows):
                    return
        raise next(iter(self._env.failed.values()))

    def _observe(self, rows: NDArray[np.intp]) -> None:
        self._env.observe(rows, {name: array[: len(rows)] for name, array in self._arrays.items()})


# ------------------------------------------------------------ generator


class _Generator:
    """A copy of the policy and what runs its passes."""

    def __init__(self, alone: Alone, left_out: list[str]) -> None:
        self._alone, self._left_out = alone, left_out
        self._seat = alone.placed.seats[alone.placed.names["generators"][0]]
        self.device = self._seat.torch_device
        before = held_on(self.device)
        self.policy = alone.build(self._seat, "act")
        as_module(self.policy).eval()
        self._resident = max(0, held_on(self.device) - before)
        config = alone.config
        self._buckets = bucket_sizes(config, alone.infos, on_device=alone.placed.serves_on_device)
        self._most = padded(largest_batch(config, alone.infos), self._buckets)
        layout = BatchLayout.of(alone.arena(1, 1))
        rows = max(self._most, _SHOWN)
        self._passes = passes_on(torch.device(self.device), layout, rows, config.rollout.graphs)

    def answers(self) -> NDArray[np.void]:
        """Answers to the observations that are shown, as records."""
        self._pass(_SHOWN)
        return self._finished.copy()

    def measure(self, budget: Budget) -> StationProfile:
        found, config = Measurements(self.device), self._alone.config
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
        measure_switch(self._alone, kept, self.device, found, budget.part(), "generator", self._left_out)
        return _station(self.device, self._resident, found)

    def _timed_pass(self, rows: int, found: Measurements) -> None:
        with found.time("pass", rows):
            self._pass(rows)

    def _pass(self, rows: int) -> None:
        """Gather the shown rows, run the pass, wait for its answers."""
        buffer = self._passes.buffer(rows)
        for name, into in buffer.obs.items():
            np.take(self._alone.obs[name], np.arange(rows), 0, into, "wrap")
        buffer.view.noise_key[:] = np.arange(rows) * 7919
        buffer.view.greedy[:] = False
        with torch.inference_mode():
            self._passes.launch(self.policy, rows, 0)
        self._finished = self._passes.finish().answers[:rows]

    def _weights(self, found: Measurements, budget: Budget) -> None:
        """Seconds until a published version is in the module."""
        module, nbytes = as_module(self.policy), self._alone.weights.nbytes
        state = {name: x.detach() for name, x in module.state_dict().items() if name in self._alone.weights.published}
        try:
            with _channel(self._alone.weights) as weights:
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


@contextmanager
def _channel(layout: WeightsLayout) -> Iterator[SharedWeights]:
    """The weights channel of a run of this machine."""
    memory = SharedRunFolder({"weights": shared_nbytes(layout)})
    try:
        weights = SharedWeights(layout, memoryview(memory.segment("weights")), memory.folder)
        yield weights
        del weights
    finally:
        memory.remove()


def measure_switch(
    alone: Alone,
    tensors: Sequence[Tensor],
    device: str,
    found: Measurements,
    budget: Budget,
    kind: Kind,
    left_out: list[str],
) -> None:
    """Leaving the device and coming back, where stations may lease one."""
    if device == CPU and alone.config.placement.sharing != "lease":
        left_out.append(f"{kind}: leaving and entering a device (offload, onload), since it is on the CPU")
        return
    store = open_store(device, "")
    nbytes = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    try:
        for count in range(FEWEST + 1):
            if budget.over and count > 1:
                break
            with found.time("offload", nbytes):
                store.suspend(tensors)
            with found.time("onload", nbytes):
                store.resume()
    finally:
        store.close()


# ------------------------------------------------------------ trainer


class _Trainer:
    """A learner, on samples whose observations are the environment's and whose answers are the policy's."""

    def __init__(self, alone: Alone, left_out: list[str]) -> None:
        self._alone, self._left_out = alone, left_out
        self._seat = alone.placed.seats[alone.placed.names["trainer"][0]]
        self.device = self._seat.torch_device
        config, before = alone.config, held_on(self.device)
        policy = alone.build(self._seat, "train")
        self.learner = Learner(
            policy,
            config.algorithm,
            config.training,
            total_updates=max(1, config.training.versions * config.freshness.sync_interval),
            seed=config.seed,
            sync_interval=config.freshness.sync_interval,
        )
        self._resident = before
        if len(alone.placed.names["trainer"]) > 1:
            left_out.append("trainer: the exchange between its ranks; one rank was measured")

    def measure(self, budget: Budget) -> tuple[list[Trajectory], StationProfile]:
        """The samples, and the profile."""
        # A trainer of its own does micro-batches one after another.
        cold = self._alone.config.launcher == "inline"
        found, learner = Measurements(self.device, cold=cold), self.learner
        torch.set_num_threads(self._seat.threads)
        samples = self._samples()
        steps = sum(sample.steps for sample in samples)
        training = self._alone.config.training
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
        measure_switch(self._alone, kept, self.device, found, budget.part(), "trainer", self._left_out)
        learner.optimizer.zero_grad()
        return samples, _station(self.device, resident, found)

    def _samples(self) -> list[Trajectory]:
        """Samples of the length that episodes have, at most as many as an update takes and memory allows."""
        alone, config = self._alone, self._alone.config
        length = max(1, round(min(alone.episodes().mean, config.rollout.segment_steps or _LONGEST, _LONGEST)))
        count = config.training.batch_size
        row = sum(x[:1].nbytes for x in alone.obs.values()) + alone.answers.itemsize
        most = max(1, int(_SAMPLES_BYTES // ((length + 1) * row)))
        if count > most:
            self._left_out.append(f"trainer: updates of more than {most} samples, whose memory would be large")
        count = min(count, most)
        arena = alone.arena(count, length)
        rng = np.random.default_rng(0)
        _fill(arena, alone.obs, alone.answers, rng)
        size, chunk = config.groups.size, alone.form.chunk
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
        layout, learner, version = self._alone.weights, self.learner, 0
        try:
            with _channel(layout) as weights:

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
