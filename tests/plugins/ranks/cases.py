"""What rank processes do in tests of several ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.plugins.language.test_causal_lm import ENV as LM_ENV
from tests.plugins.language.test_causal_lm import built as built_lm
from tests.plugins.language.test_causal_lm import observations as lm_observations
from tests.plugins.vla.flow_case import SPEC as FLOW_SPEC
from tests.plugins.vla.flow_case import SmallFlowSettings, observations
from tests.training.adapted_run import plain, small
from tests.training.test_micro_batches import CountingPolicy
from tests.training.test_moments import learner_of
from tests.training.toy import ToyPolicy, algorithm, training
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polyrhythm.config.registry import resolve
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE
from polyrhythm.plugins.lease.offload import FileStore
from polyrhythm.plugins.ranks.shards import is_sharded
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.policies.flow_matching import FlowNoise
from polyrhythm.specs import Trajectory, WeightsLayout
from polyrhythm.stations.generator_factory import PolicyFactory
from polyrhythm.training.learner import Learner
from polyrhythm.training.ranks import Ranks
from polyrhythm.training.steps import finish


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    named = learner.module.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    return {name: x.detach().cpu().clone() for name, x in learner.ranks.snapshot(gradients)}


def first_gradients(
    ranks: Ranks, cases: list[tuple[dict[str, Any], dict[str, Any], list[Trajectory]]]
) -> list[dict[str, Tensor]]:
    """Of each case (algorithm, training, trajectories) the gradient of the toy policy's first optimizer step."""
    answers = []
    for settings, train, trajectories in cases:
        policy = policy_of("toy", per_action=settings.get("reward_level") == "action")
        learner = Learner(policy, algorithm(**settings), training(**train), total_updates=10, seed=7, ranks=ranks)
        steps = learner.update(trajectories, 0, version=4)
        next(steps)
        answers.append(gradients_of(learner))
        steps.close()
    return answers


def many_trained(ranks: Ranks, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`trained` of each case."""
    return [trained(ranks, **case) for case in cases]


class OddPolicy(ToyPolicy):
    """On rank 1 the value of a last observation is not finite."""

    def __init__(self, *, value_of_last: float) -> None:
        super().__init__(dtype=torch.float32)
        self.value_of_last = value_of_last

    def value(self, obs: Observations) -> Tensor:
        found = super().value(obs)
        return found + self.value_of_last * (dist.get_rank() == 1) if dist.is_initialized() else found


class HeavyPolicy(ToyPolicy):
    """With ballast: weights that have gradients and moments, and no effect."""

    BALLAST = 2**20

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.ballast = torch.nn.Parameter(torch.arange(float(self.BALLAST)))

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(obs, forward_inputs)
        return found._replace(value=found.value + 0.0 * self.ballast.sum())


class PartsPolicy(ToyPolicy):
    """With one part for rows above a bound and one for those far below, which it leaves out where no row is such."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.above, self.below = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(obs, forward_inputs)
        value, first = found.value, obs["x"][:, 0]
        for part, rows in ((self.above, first > 0.8), (self.below, first < -0.8)):
            if rows.any():
                value = value + part.sum() * rows
        return found._replace(value=value)


class BallastPolicy(ToyPolicy):
    """With ballast in pieces, as layers are."""

    PIECES, BYTES = 8, 32 * 2**20

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        sizes = [self.BYTES // self.PIECES // 4] * self.PIECES
        self.ballast = torch.nn.ParameterList(torch.ones(size) for size in sizes)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(obs, forward_inputs)
        return found._replace(value=found.value + sum(0.0 * p.sum() for p in self.ballast))


def growth_by_step(ranks: Ranks, train: dict[str, Any], trajectories: list[Trajectory]) -> list[float]:
    """By how many times the bytes of a policy's weights what torch has allocated grew at most in each optimizer step.

    Torch's own account: what a process of the pool has resident depends on the cases that it executed before.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as account:
        learner = Learner(BallastPolicy(), algorithm(), training(**train), total_updates=1, seed=0, ranks=ranks)
        steps, times = learner.update(trajectories, 0, version=1), []
        while True:
            begin = time.time_ns()
            try:
                next(steps)
            except StopIteration:
                break
            times.append((begin, time.time_ns()))
    events = sorted(account.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    growth = []
    for begin, end in times:
        of_step = accumulate(size for when, size in changes if begin <= when < end)
        growth.append(max(of_step) / BallastPolicy.BYTES)
    return growth


def sums_beside_gradients(ranks: Ranks, kind: str, trajectories: list[Trajectory]) -> list[int]:
    """How many sums over ranks each of three optimizer steps begins that are not of a bucket of gradients."""
    policy = policy_of(kind)
    learner = Learner(policy, algorithm(), training(minibatch_steps=8), total_updates=1, seed=0, ranks=ranks)
    wrapped, counts, summed = learner.micro_step, [], []

    def counted(x: Tensor, *args: Any, **settings: Any) -> Any:
        summed.append(x.data_ptr())
        return all_reduce(x, *args, **settings)

    all_reduce = dist.all_reduce
    dist.all_reduce = counted
    try:
        for _ in learner.update(trajectories, 0, version=1):
            buckets = {bucket.data_ptr() for bucket in wrapped.module.buckets}
            counts.append(sum(place not in buckets for place in summed))
            summed.clear()
    finally:
        dist.all_reduce = all_reduce
    return counts


def of_own_seeds(ranks: Ranks) -> None:
    policy = ToyPolicy(seed=ranks.rank)
    Learner(policy, algorithm(), training(), total_updates=1, seed=0, ranks=ranks)


def sharded_with(ranks: Ranks, defect: str) -> str:
    """The error of a policy with a tensor on meta: an unread `parameter` or `buffer`, or a `plain` one, that is
    neither."""
    policy, x = policy_of("toy"), torch.ones(4, device="meta")
    if defect == "parameter":
        policy.trunk[0].weight = torch.nn.Parameter(policy.trunk[0].weight.to("meta"))
    elif defect == "buffer":
        policy.trunk.register_buffer("scale", x)
    else:
        policy.trunk.tables = {"scale": [x]}
    try:
        Learner(policy, algorithm(), training(), total_updates=1, seed=0, ranks=ranks)
    except ConfigError as error:
        return str(error)
    return ""


def saved_to(ranks: Ranks, path: str) -> str:
    """The kind of error that saving there ends with."""
    learner = Learner(policy_of("toy"), algorithm(), training(), total_updates=1, seed=0, ranks=ranks)
    try:
        learner.save(Path(path)).wait()
    except OSError as error:
        return type(error).__name__
    return ""


def saved_late_by_rank_0(ranks: Ranks, path: str) -> bool:
    """Whether rank 1 makes the unfinished folder before rank 0 saves, which could then be removing that of a killed
    trainer."""
    learner = Learner(policy_of("toy"), algorithm(), training(), total_updates=1, seed=7, ranks=ranks)
    folder = Path(path)
    early = False
    if ranks.rank == 0:
        time.sleep(0.5)
        early = folder.with_name(f"{folder.name}.part").exists()
    learner.save(folder).wait()
    return early


def saved_late_by_rank_1(ranks: Ranks, path: str, trajectories: list[Trajectory]) -> tuple[dict[str, Tensor], bool]:
    """Rank 0 begins to save after an update, rank 1 after the next one, so nothing is written before: the weights after
    the first, and whether the state was on its way, without its name, all the time."""
    learner = Learner(policy_of("toy"), algorithm(), training(), total_updates=2, seed=0, ranks=ranks)
    finish(learner.update(trajectories, 0, version=1))
    before = {name: x.clone() for name, x in learner.publishable()}
    saving = learner.save(Path(path)) if ranks.rank == 0 else None
    finish(learner.update(trajectories, 1, version=2))
    pending = not Path(path).exists() and (saving is None or not saving.over)
    ranks.total(torch.zeros(1))  # both have looked
    (saving or learner.save(Path(path))).wait()
    return before, pending


def built(ranks: Ranks, settings: dict[str, Any]) -> dict[str, Any]:
    """A policy as the trainer builds it: its weights as published, a gradient, the largest share of its bytes that was
    whole at a time, devices of its parts, and the most memory that was allocated on this rank's, in their bytes."""
    from tests.plugins.trial.test_policy_contract import Case
    from tests.plugins.vla.test_pi0_settings import SPEC

    resolved = resolve("policy", settings)
    layout = WeightsLayout.of(resolved.form(SPEC).published)
    policy: Any = PolicyFactory(settings, SPEC, 3).build(
        str(ranks.device or "cpu"), "train", layout, in_parts=ranks.divides
    )
    whole = [sum(p.nbytes for p in policy.parameters() if not p.is_meta)]

    def load_part(part: torch.nn.Module, device: str) -> None:
        load(part, device)
        whole.append(sum(p.nbytes for p in policy.parameters() if not p.is_meta and not is_sharded(p)))

    load, policy.load_part = policy.load_part, load_part
    learner = Learner(policy, algorithm(), training(), total_updates=1, seed=0, ranks=ranks)
    on_device = ranks.device is not None and ranks.device.type == "cuda"
    # As requested: the allocator rounds up, which is much for a policy of many small tensors.
    peak = torch.cuda.memory_stats(ranks.device)["requested_bytes.all.peak"] if on_device else 0
    obs = {name: x.to(ranks.device or "cpu") for name, x in Case(resolved, SPEC).observations().items()}
    rows = torch.arange(12, device=ranks.device)
    found = policy.evaluate(obs, policy.act(obs, rows < 0, rows).forward_inputs)
    (found.logprob.mean() + found.value.mean()).backward()
    return {
        "weights": {name: x.detach().cpu() for name, x in learner.publishable()},
        "gradient": {name: x / ranks.size for name, x in gradients_of(learner).items()},
        "whole": max(whole) / sum(p.nbytes for p in policy.parameters()),
        "peak": peak / sum(p.nbytes for p in policy.parameters()),
        "devices": {str(ranks.part(p).device) for p in policy.parameters()},
    }


def policy_of(kind: str, **changes: Any) -> Any:
    """One of the small policies: toy, counting (tokens), adapted (a decoder with an expert), plain (without what frozen
    parts allow), flow (pi0), lm (a language model); changes: of its settings."""
    if kind == "toy":
        return ToyPolicy(dtype=torch.float32, **changes)
    if kind == "counting":
        return CountingPolicy(dtype=torch.float32, **changes)
    if kind == "odd":
        return OddPolicy(**changes)
    if kind in {"heavy", "parts", "ballast"}:
        return {"heavy": HeavyPolicy, "parts": PartsPolicy, "ballast": BallastPolicy}[kind]()
    if kind == "flow":
        method = FlowNoise()
        return SmallFlowSettings(method=method, **changes).build(FLOW_SPEC, seed=0, device="cpu", role="train")
    if kind == "lm":
        return built_lm(**changes)
    policy = small(**changes)
    return plain(policy) if kind == "plain" else policy


def trained(
    ranks: Ranks,
    kind: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    train: dict[str, Any],
    trajectories: list[list[Trajectory]],
    *,
    load: str = "",
    save: str = "",
    shift: float = 0.0,
    offload: str = "",
) -> dict[str, Any]:
    """A policy trained on one update for each list of trajectories: its whole weights as published, its state, and
    metrics. load, save: paths of states to begin and to end with. shift: how far the weights are moved before each
    update but the first, so that they are not the reference's. offload: a folder where the memory of the learner is
    after each update."""
    policy = policy_of(kind, **changes)
    if ranks.device is not None and not ranks.divides:
        policy.to(ranks.device)
    policy.eval()
    learner = Learner(policy, algorithm(**settings), training(**train), total_updates=40, seed=3, ranks=ranks)
    if load:
        learner.load(Path(load))
    start = learner.updates
    metrics, freed = [], 0
    store = FileStore(Path(offload))
    for i, data in enumerate(trajectories):
        if i and shift:
            moved = {name: x + shift * torch.arange(x.numel()).sin().view_as(x) for name, x in learner.publishable()}
            learner.load_weights(moved)
        metrics.append(finish(learner.update(data, start + i, version=start + i + 1, own_version=start + i)))
        if offload:
            freed = store.suspend(learner.kept_tensors())
            store.resume()
    store.close()
    if save:
        learner.save(Path(save)).wait()
    return {
        "weights": {name: x.detach().cpu().clone() for name, x in learner.publishable()},
        "metrics": metrics,
        "updates": learner.updates,
        "halt": learner.halt,
        "freed": freed,
        "gradient": gradients_of(learner),
        "state": whole_state(learner.state_dict(), ranks),
    }


def written(ranks: Ranks, memories: list[str]) -> tuple[bool, list[tuple[str, int | None, Tensor]]]:
    """Whether ranks with these memories write all of a policy between them, and what this one writes."""
    policy = policy_of("adapted", train="expert")
    learner = Learner(policy, algorithm(), training(), total_updates=2, seed=0, ranks=ranks)
    together = ranks.divide_writing(learner.published(), memories[ranks.rank])
    pieces = ranks.pieces(learner.published())
    return together, [(piece.name, piece.first, piece.rows.detach().clone()) for piece in pieces]


def whole_state(state: Any, ranks: Ranks) -> Any:
    if isinstance(state, dict):
        return {key: whole_state(x, ranks) for key, x in state.items()}
    if not isinstance(state, Tensor):
        return state
    ((_, whole),) = ranks.snapshot({"": state})
    return whole.detach().cpu().clone()


def lm_trajectories(lengths: tuple[int, ...] = (3, 20, 7, 1, 12, 5), *, critic: bool = False) -> list[Trajectory]:
    """Messages of so many tokens, two to a prompt, of which the last is truncated; critic: with a value per token."""
    policy, rng, shown = policy_of("lm"), np.random.default_rng(0), lm_observations(LM_ENV, 1 + len(lengths) // 2)
    found = []
    for i, tokens in enumerate(lengths):
        message = rng.integers(1, 15, size=(1, policy.chunk), dtype=np.int32)
        message[:, tokens - 1 :] = LM_ENV.spec().action.stops[0]
        obs = {name: x[[i // 2, -1]] for name, x in shown.items()}
        with torch.no_grad():
            logprob = policy.evaluate({k: x[:1] for k, x in obs.items()}, {MESSAGE: torch.from_numpy(message)}).logprob
        found.append(
            Trajectory(
                obs={name: x.numpy() for name, x in obs.items()},
                actions=message[..., None],
                logprob=logprob.numpy() + rng.normal(scale=0.1, size=logprob.shape).astype(np.float32),
                value=np.zeros((1, policy.chunk) if critic else 1, np.float32),
                forward_inputs={MESSAGE: message},
                rewards=np.where(np.arange(policy.chunk) == tokens - 1, rng.random(), 0.0)[None].astype(np.float32),
                valid=(np.arange(policy.chunk) < tokens)[None],
                version=np.zeros(1, dtype=np.int64),
                terminated=i < len(lengths) - 1,
                truncated=i == len(lengths) - 1,
                success=False,
                env_steps=1,
                ticket=i,
                group=i // 2,
                task=0,
            )
        )
    return found


def flow_trajectories(lengths: tuple[int, ...] = (3, 1, 4, 2)) -> list[Trajectory]:
    """Samples of the small flow policy, two to a group."""
    policy, rng = policy_of("flow"), np.random.default_rng(0)
    found = []
    for i, steps in enumerate(lengths):
        obs = {name: x.numpy() for name, x in observations(steps + 1).items()}
        obs["proprio"] = rng.normal(size=obs["proprio"].shape).astype(np.float32)
        shown = {name: torch.from_numpy(x[:-1]) for name, x in obs.items()}
        act = policy.act(shown, torch.zeros(steps, dtype=torch.bool), torch.arange(steps) + 100 * i)
        chunk = act.actions.shape[1]
        found.append(
            Trajectory(
                obs=obs,
                actions=act.actions.numpy(),
                logprob=act.logprob.numpy(),
                value=act.value.numpy(),
                forward_inputs={name: x.numpy() for name, x in act.forward_inputs.items()},
                rewards=rng.random((steps, chunk)).astype(np.float32),
                valid=np.ones((steps, chunk), dtype=np.bool_),
                version=np.zeros(steps, dtype=np.int64),
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                success=False,
                env_steps=steps * chunk,
                ticket=i,
                group=i // 2,
                task=0,
            )
        )
    return found


def rank_statistics(ranks: Ranks, trajectories: list[list[Trajectory]]) -> dict[str, Any]:
    """Statistics after updates on these, as they are published, and the metrics of the last one."""
    _, learner = learner_of(ranks=ranks)
    metrics = [finish(learner.update(data, index)) for index, data in enumerate(trajectories)][-1]
    published = {name.removeprefix("flat.normalizer."): x.clone() for name, x in learner.publishable()}
    return published | metrics
