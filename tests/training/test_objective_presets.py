"""Each preset trains on the policy it is for, and two updates equal a plain loop of its system's formulas.

Samples come from the command line that docs/objectives.md gives for the preset, in small. Their rewards, recorded
log-probs and values are then drawn, so that every branch of a loss is taken, and a fresh `Learner` is compared with
`SYSTEMS`: the formulas of each system's source (objective_presets.py has files and revisions) in float64, which share
nothing with polyrhythm.algorithms. RLinf's simulators execute each chunk to its end, so its episodes here end with one.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import long
from torch import Tensor

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.config.presets import OBJECTIVE_PRESETS
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import OptimizerSettings
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.traits import policy_traits
from polyrhythm.specs import Trajectory
from polyrhythm.training.checkpoint import load_state
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import Steps, finish

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"
SMALL = "launcher=inline training.versions=2 training.mini_batch_samples=8 rollout.rows=8 evaluation.episodes=0"
SMALL_BY_KIND = {
    "vla": "env.max_steps=40 demonstrations=null supervised=null training.critic_warmup_updates=0",
    "language": "env.terms=[2,4] env.max_new_tokens=24 policy.layers=1 policy.width=16 policy.heads=2 groups.size=4 "
    "demonstrations.episodes_per_task=40 supervised.steps=4 supervised.warmup_steps=1 training.optimizer.lr=0.1",
}
#: Epochs of each of the two updates, and the version that the first one produces.
EPOCHS, FIRST = 3, 4


def lines() -> dict[str, list[str]]:
    """Preset → what the page writes after `polyrhythm train`."""
    found = re.findall(
        r"^\| `(\w+)` \|.*\| `(\S+ objective=\1[^`]*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: shlex.split(words) for name, words in found}


@dataclass
class Collected:
    """A line's run: its policy before the first update, and the samples of both updates."""

    config: RunConfig
    policy: Policy
    updates: list[list[Trajectory]]
    folder: Path


#: The page's lines, and one of another VLA with a value for each action.
CASES = {
    **lines(),
    "rlinf_maniskill of pi0": shlex.split("quickstart_pi0 objective=rlinf_maniskill policy.value_level=action"),
}


#: Those of VLA policies that differ from one of the others in less.
LONG = ("rlinf_libero", "rlinf_libero_grpo", "rlinf_libero_grpo_async", "rlinf_maniskill of pi0")


@pytest.fixture(
    scope="module",
    params=[pytest.param(words, id=case, marks=[long(5, case)] * (case in LONG)) for case, words in CASES.items()],
)
def collected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Collected:
    recipe, *more = request.param
    words = [*more, *SMALL.split(), *SMALL_BY_KIND["language" if recipe == "quickstart_lm" else "vla"].split()]
    words += ["groups.size=4"] * any(word.startswith("groups.size=") for word in more)
    folder = tmp_path_factory.mktemp("run") / "run"
    policies: list[Policy] = []
    updates: list[list[Trajectory]] = []
    update = Learner.update

    def recording(learner: Learner, trajectories: Sequence[Trajectory], *arguments: Any, **keywords: Any) -> Steps:
        policies.append(copy.deepcopy(learner.policy))
        updates.append(copy.deepcopy(list(trajectories)))
        return update(learner, trajectories, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", recording)
        assert main(["train", recipe, *words, "--out", str(folder)]) == 0
    return Collected(load_config(recipe, words), policies[0], updates, folder)


def test_the_page_has_a_line_for_every_preset() -> None:
    assert lines().keys() == OBJECTIVE_PRESETS.keys()


def test_the_line_of_the_page_trains_two_updates(collected: Collected) -> None:
    assert json.loads((collected.folder / "summary.json").read_text())["ledger"]["trained"] == 16
    assert f"\nobjective: {collected.config.objective}\n" in (collected.folder / "config.yaml").read_text()
    saved = load_state(collected.folder / "policy.pt")["policy"]
    before = as_module(collected.policy).state_dict()
    value = [name for name in saved if name.startswith("critic.")]
    moved = {name for name, x in saved.items() if not torch.equal(x, before[name])}
    assert moved >= set(value) if collected.config.algorithm.value.coef else not moved & set(value)


# ------------------------------------------------------------ the plain loop


@dataclass
class Data:
    """A whole update as its system has it: padded to T chunk steps, float64.

    mask, rewards [B,T,C]; old (behaviour), prox (trainer's at the update's start), ref, logp [B,T,C,A], logp with
    gradient; versions [B,T]; values, old_values [B,T] or [B,T,C]; last [B] of the final observation; group [B].
    """

    mask: Tensor
    rewards: Tensor
    old: Tensor
    prox: Tensor
    ref: Tensor
    old_values: Tensor
    last: Tensor
    group: Tensor
    versions: Tensor
    logp: Tensor
    values: Tensor
    version: int


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's loss by entry: the larger of two losses, and with `dual` at most dual·|A| where A < 0."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return loss if dual is None else torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, last: Tensor, gamma: float, lam: float) -> Tensor:
    """Backwards over [B,T] from the value `last` [B]; masked entries are passed over."""
    after, carried, out = last, torch.zeros_like(last), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        step = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * carried
        carried, after = torch.where(mask[:, t], step, carried), torch.where(mask[:, t], values[:, t], after)
        out[:, t] = carried
    return out


def whitened(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    return (x - x[mask].mean()) / (x[mask].std() + eps)  # torch's std is over n - 1


def grouped(scores: Tensor, group: Tensor, eps: float) -> Tensor:
    out = torch.zeros_like(scores)
    for one in group.unique():
        mine = group == one
        out[mine] = (scores[mine] - scores[mine].mean()) / (scores[mine].std() + eps)
    return out


def critic_loss(d: Data, values: Tensor, returns: Tensor, clip: float, huber: float = 1e9) -> Tensor:
    def cost(error: Tensor) -> Tensor:
        return torch.where(error.abs() < huber, error.square() / 2, huber * (error.abs() - huber / 2))

    old = d.old_values.reshape(values.shape)
    return torch.maximum(cost(values - returns), cost(old + (values - old).clamp(-clip, clip) - returns))


def rlinf(*, decoupled: bool = False, critic: bool = True, resets: bool = False, high: float = 0.2) -> Callable:
    """resets: ManiSkill's token-level policies, whose environments go on by themselves (no loss mask, a value at every
    end, a reward for each action). Otherwise LIBERO's: flow policies by chunk with a critic, token policies without."""

    def loss(d: Data) -> tuple[Tensor, Tensor]:
        batch, steps, chunk, _ = d.logp.shape
        by_chunk = critic and not resets
        if by_chunk:
            mask, rewards = d.mask.any(-1), d.rewards.sum(-1)
            logp, old = d.logp.sum((-1, -2)), d.old.sum((-1, -2))
        else:
            mask, rewards = d.mask.reshape(batch, -1), d.rewards.reshape(batch, -1)
            logp, old = (x.reshape(batch, steps * chunk, -1) for x in (d.logp, d.old))
        values, old_values = d.values.reshape(batch, -1), d.old_values.reshape(batch, -1)
        if critic:
            last = d.last if resets else torch.zeros_like(d.last)
            advantage = gae(rewards, old_values, mask, last, 0.99, 0.95)
            returns, advantage = advantage + old_values, whitened(advantage, mask, 1e-5)
        else:
            advantage = grouped(rewards.sum(1), d.group, 1e-6)[:, None].expand_as(rewards)
        weight = torch.ones(())
        if decoupled:
            versions = d.versions if by_chunk else d.versions.repeat_interleave(chunk, 1).unsqueeze(-1)
            alpha = (d.version - 1 - versions) / (d.version - versions)
            prox = (old + alpha * (logp - old)).detach()
            weight, old = (prox - old).exp(), prox
            weight = torch.where(weight <= 2.0, weight, 0.0)
        shaped = (lambda x: x) if by_chunk else (lambda x: x.unsqueeze(-1))
        entries = weight * surrogate((logp - old).exp(), shaped(advantage), 0.2, high, 3.0 if decoupled else None)
        share = d.mask.sum((1, 2)) / (steps * chunk)  # executed actions of the episode / of the longest

        def mean(x: Tensor, seen: Tensor) -> Tensor:
            if resets:
                return x[seen.expand_as(x)].mean()
            return (x / share.reshape(-1, *[1] * (x.dim() - 1)) * seen).mean()

        policy = mean(entries, shaped(mask))
        if not critic:
            return policy, torch.zeros(())
        return policy, mean(critic_loss(d, values, returns, 0.2, 10.0), mask)

    return loss


def tokens(d: Data) -> Iterator[Tensor]:
    """Of answers to one prompt: mask, rewards, log-probs and those recomputed and recorded, all [B,C]."""
    yield from (d.mask[:, 0], d.rewards[:, 0], d.logp[:, 0, :, 0], d.prox[:, 0, :, 0], d.old[:, 0, :, 0])


def verl_ppo(d: Data) -> tuple[Tensor, Tensor]:
    mask, rewards, logp, prox, _ = tokens(d)
    values, old_values = d.values[:, 0], d.old_values[:, 0]
    advantage = gae(rewards, old_values, mask, torch.zeros_like(d.last), 1.0, 1.0)
    returns, advantage = advantage + old_values, whitened(advantage, mask, 0.0)
    policy = surrogate((logp - prox).exp(), advantage, 0.2, 0.2, 3.0)[mask].mean()
    return policy, critic_loss(d, values, returns, 0.5)[mask].mean()


def verl_grpo(d: Data) -> tuple[Tensor, Tensor]:
    mask, rewards, logp, prox, _ = tokens(d)
    advantage = grouped(rewards.sum(1), d.group, 1e-6)[:, None].expand_as(logp)
    move = d.ref[:, 0, :, 0] - logp
    kl = (move.exp() - move - 1).clamp(-10, 10)
    entries = surrogate((logp - prox).exp(), advantage, 0.2, 0.2, 3.0)
    return entries[mask].mean(), 0.001 * kl[mask].mean()


def areal(d: Data) -> tuple[Tensor, Tensor]:
    mask, rewards, logp, prox, old = tokens(d)
    scores = (rewards.sum(1) - 0.5) * 10  # then a bound of ±20, which scores of 0 and 1 do not reach
    advantage = whitened(grouped(scores, d.group, 1e-9)[:, None].expand_as(logp), mask, 1e-9)
    weight = (prox - old).exp()
    entries = torch.where(weight <= 5.0, weight, 0.0) * surrogate((logp - prox).exp(), advantage, 0.4, 0.4)
    return entries[mask].mean(), torch.zeros(())


def roll(d: Data) -> tuple[Tensor, Tensor]:
    mask, rewards, logp, prox, _ = tokens(d)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    advantage = whitened(to_go, mask, 0.0).clamp(-2, 2)
    entries = surrogate((logp - prox).exp(), advantage, 0.2, 0.2, 1 + 2 * 0.2) * mask
    return (entries.sum(1) / mask.sum(1)).mean(), torch.zeros(())


def trl(d: Data) -> tuple[Tensor, Tensor]:
    mask, rewards, logp, prox, old = tokens(d)
    advantage = grouped(rewards.sum(1), d.group, 1e-4)[:, None]
    ratio = ((prox - old) * mask).sum(1, keepdim=True).exp()
    entries = ratio.masked_fill(ratio > 3.0, 0.0) * surrogate((logp - prox).exp(), advantage, 0.2, 0.2)
    return entries[mask].mean(), torch.zeros(())


#: Preset → (policy loss, whatever is added to it).
SYSTEMS: dict[str, Callable[[Data], tuple[Tensor, Tensor]]] = {
    "rlinf_libero": rlinf(),
    "rlinf_libero_async": rlinf(decoupled=True),
    "rlinf_libero_grpo": rlinf(critic=False, high=0.28),
    "rlinf_libero_grpo_async": rlinf(decoupled=True, critic=False, high=0.28),
    "rlinf_maniskill": rlinf(resets=True, high=0.28),
    "verl_ppo": verl_ppo,
    "verl_grpo": verl_grpo,
    "areal": areal,
    "roll": roll,
    "trl_grpo": trl,
}


def drawn(found: Collected, update: int) -> list[Trajectory]:
    """An update's samples with rewards, recorded log-probs, values, versions and lengths that decide something."""
    rng = np.random.default_rng(update)
    out = []
    for i, t in enumerate(found.updates[update]):
        steps = t.steps - (i % 2 if t.steps > 1 else 0)
        rewards = (20.0 if i == 0 and t.steps > 1 else 1.0) * rng.normal(size=t.rewards[:steps].shape) * t.valid[:steps]
        if t.steps == 1:  # a message is rewarded at its end
            last = int(t.valid[0].sum()) - 1
            rewards = np.where(np.arange(rewards.shape[1]) == last, rewards, 0.0)
        out.append(
            replace(
                t,
                obs={name: x[: steps + 1] for name, x in t.obs.items()},
                forward_inputs={name: x[:steps] for name, x in t.forward_inputs.items()},
                actions=t.actions[:steps],
                logprob=(
                    t.logprob[:steps] + (0.8 if t.steps == 1 else 0.3) * rng.normal(size=t.logprob[:steps].shape)
                ).astype(np.float32),
                value=(t.value[:steps] + 0.3 * rng.normal(size=t.value[:steps].shape)).astype(np.float32),
                rewards=rewards.astype(np.float32),
                valid=t.valid[:steps],
                version=rng.integers(0, FIRST + update, steps),
                newer=None,
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                group=i // 4,
            )
        )
    return out


def padded(trajectories: list[Trajectory], x: Tensor) -> Tensor:
    """Rows of all trajectories, one after another, as [B,T,...]."""
    pieces = x.double().split([t.steps for t in trajectories])
    return torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)


def rows(trajectories: list[Trajectory], of: Callable[[Trajectory], Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([of(t) for t in trajectories]))


def plain_loop(found: Collected, policy: Policy, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, float]]:
    """Trains the policy; for each update the means over its optimizer steps, as the learner reports them."""
    parameters = [p for p in as_module(policy).parameters() if p.requires_grad]
    settings, reference = found.config.training.optimizer, copy.deepcopy(policy)
    rates = [group["lr"] for group in optimizer.param_groups]
    for update in range(2):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (settings.lr_final_fraction if update else 1.0)
        data = drawn(found, update)
        obs = {name: rows(data, lambda t, name=name: t.obs[name][:-1]) for name in data[0].obs}
        final = {name: rows(data, lambda t, name=name: t.obs[name][-1:]) for name in data[0].obs}
        given = {name: rows(data, lambda t, name=name: t.forward_inputs[name]) for name in data[0].forward_inputs}
        with torch.no_grad():
            start, frozen, last = policy.evaluate(obs, given), reference.evaluate(obs, given), policy.value(final)
        recorded = start.value if policy_traits(policy).values_late else rows(data, lambda t: t.value)
        fixed = {
            "mask": padded(data, rows(data, lambda t: t.valid)).bool(),
            "rewards": padded(data, rows(data, lambda t: t.rewards)),
            "old": padded(data, rows(data, lambda t: t.logprob)),
            "prox": padded(data, start.logprob),
            "ref": padded(data, frozen.logprob),
            "old_values": padded(data, recorded),
            "last": (last if last.dim() == 1 else last[:, 0]).double(),
            "group": torch.tensor([t.group for t in data]),
            "versions": padded(data, rows(data, lambda t: t.version)),
        }
        reports = torch.zeros(EPOCHS, 3)
        for report in reports:
            now = policy.evaluate(obs, given)
            whole = Data(
                **fixed, logp=padded(data, now.logprob), values=padded(data, now.value), version=FIRST + update
            )
            losses = SYSTEMS[found.config.objective](whole)
            optimizer.zero_grad()
            sum(losses).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip)
            optimizer.step()
            report.copy_(torch.stack([*losses, norm]).detach())
        actor, critic, norm = reports.mean(0).tolist()
        found_critic = {"train/critic/value_loss": critic} if found.config.algorithm.value.coef else {}
        yield {"train/actor/policy_loss": actor, "train/actor/grad_norm": norm, **found_critic}


def test_two_updates_equal_the_plain_loop_of_the_system(collected: Collected) -> None:
    config = collected.config
    training = config.training.model_copy(update={"epochs": EPOCHS, "minibatch_steps": 0})
    trained, policy = (copy.deepcopy(collected.policy) for _ in range(2))
    learner = Learner(trained, config.algorithm, training, total_updates=2, seed=0)
    as_module(policy).eval()
    optimizer = torch.optim.AdamW(
        [{**group} for group in parameter_groups(policy, training.optimizer)],
        betas=training.optimizer.betas,
        weight_decay=training.optimizer.weight_decay,
    )
    close = 2e-5 if config.policy.type == "causal_lm" else 1e-3  # rounding of float32 networks of these sizes
    for update, wanted in enumerate(plain_loop(collected, policy, optimizer)):
        metrics = finish(learner.update(drawn(collected, update), update, version=FIRST + update))
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=close, abs=1e-6)
    start, ours, plain = (flat_weights(x) for x in (collected.policy, trained, policy))
    assert (ours - plain).norm() < close * (plain - start).norm()


def parameter_groups(policy: Policy, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Trained parameters, the critic's with a rate of its own."""
    of = {name: p for name, p in as_module(policy).named_parameters() if p.requires_grad}
    critic = [p for name, p in of.items() if name.startswith("critic.") and settings.value_lr is not None]
    rest = [p for p in of.values() if all(p is not other for other in critic)]
    return [{"params": rest, "lr": settings.lr}, *[{"params": critic, "lr": settings.value_lr}] * bool(critic)]


def flat_weights(policy: Policy) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in as_module(policy).parameters() if p.requires_grad])
