"""Targets of an update of messages, against the formulas of other systems, for their presets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms.reference import group_score
from tests.training.toy import ToyPolicy, collect
from torch import Tensor

from polyrhythm.config.presets import objective_preset
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import TrainingBatch, collate
from polyrhythm.training.targets import TargetInputs, compute_targets

TOKENS = 4
#: Conversations by the tokens of their messages, and what each earned; every two are a group.
LENGTHS = [[1, 2], [4], [3, 1], [2, 2, 1]]
EARNED = [1.0, 0.0, 0.0, 0.5]
#: log(π_prox/π_b) of every token.
GAP = 0.35


class Fixed:
    """A policy of messages without a value function: every log-prob is GAP above the recorded one."""

    def evaluate(self, obs: Observations, forward_inputs: dict[str, Tensor]) -> Evaluation:
        logprob = forward_inputs["logprob"] + GAP
        return Evaluation(logprob, torch.zeros(len(logprob)), torch.zeros_like(logprob))


def conversation(index: int) -> Trajectory:
    lengths = np.array(LENGTHS[index])
    turns = len(lengths)
    valid = np.arange(TOKENS) < lengths[:, None]
    logprob = -np.random.default_rng(index).random((turns, TOKENS, 1)).astype(np.float32)
    rewards = np.zeros((turns, TOKENS), np.float32)
    rewards[-1, lengths[-1] - 1] = EARNED[index]
    return Trajectory(
        obs={"x": np.zeros((turns + 1, 1), np.float32)},
        actions=np.zeros((turns, TOKENS, 1), np.float32),
        logprob=logprob,
        value=np.zeros(turns, np.float32),
        forward_inputs={"logprob": logprob},
        rewards=rewards,
        valid=valid,
        version=np.zeros(turns, np.int64),
        terminated=True,
        truncated=False,
        success=None,
        env_steps=turns,
        ticket=index,
        group=index // 2,
        task=0,
    )


def targets(preset: str, **changes: Any) -> TrainingBatch:
    settings = AlgorithmSettings.model_validate(objective_preset(preset) | changes)
    inputs = TargetInputs(Fixed(), None, 1, 0, torch.device("cpu"))  # type: ignore[arg-type]
    return compute_targets(collate([conversation(index) for index in range(4)]), settings, inputs)[0]


def by_token(of_conversation: list[float]) -> list[float]:
    """One number for each token of each conversation."""
    return [x for lengths, x in zip(LENGTHS, of_conversation, strict=True) for _ in range(sum(lengths))]


def group_scores() -> list[float]:
    scores = torch.tensor(EARNED, dtype=torch.float64).reshape(2, 2)
    return ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten().tolist()


@pytest.mark.parametrize(("preset", "scores", "bound"), [("areal", group_scores(), 99.0), ("roll", EARNED, 2.0)])
def test_areal_and_roll_whiten_tokens(preset: str, scores: list[float], bound: float) -> None:
    """Each token counts once in the mean, so long messages weigh more than short ones."""
    batch = targets(preset)
    tokens = np.array(by_token(scores))
    wanted = np.clip((tokens - tokens.mean()) / tokens.std(ddof=1), -bound, bound)
    mask = batch.valid.unsqueeze(-1)
    assert batch.advantage[mask].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    messages = targets(preset, reward_level="chunk").advantage[mask]
    assert messages.tolist() != pytest.approx(wanted.tolist(), rel=1e-2), "messages of unequal lengths tell them apart"


@pytest.mark.parametrize("level", ["chunk", "action"])
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "maxrl"])
def test_overlong_messages_count_once_in_the_return(advantage: str, level: str) -> None:
    """C = 4, the last 2 tokens: messages of 1 to 4 tokens cost 0, 0, ½ and 1 more, each of a conversation its own."""
    shaped = [e - sum({3: 0.5, 4: 1.0}.get(n, 0.0) for n in own) for e, own in zip(EARNED, LENGTHS, strict=True)]
    assert shaped == [1.0, -1.0, -0.5, 0.5]
    packed = collate([conversation(index) for index in range(4)])
    before = packed.rewards.clone()
    common = {"value": {"coef": 0.0}, "proximal": "behavior", "reward_level": level, "advantage": advantage}
    inputs = TargetInputs(Fixed(), None, 1, 0, torch.device("cpu"))  # type: ignore[arg-type]
    settings = AlgorithmSettings.model_validate(common | {"overlong": {"tokens": 2}})
    batch, metrics = compute_targets(packed, settings, inputs)
    mask = batch.valid.unsqueeze(-1)
    wanted = [group_score("sample" if advantage == "grpo" else advantage, i, shaped, [0, 0, 1, 1]) for i in range(4)]
    assert batch.advantage[mask].tolist() == pytest.approx(by_token(wanted), rel=1e-5)
    assert metrics["train/actor/overlong_penalty"] == pytest.approx(-1.5 / 8)
    assert metrics["train/actor/overlong_fraction"] == 2 / 8
    assert torch.equal(packed.rewards, before), "those of the samples, which episodes report"
    plain = compute_targets(packed, AlgorithmSettings.model_validate(common), inputs)[1]
    assert not any("overlong" in name for name in plain)


def test_trl_weighs_and_rejects_whole_conversations() -> None:
    """Conversations of 3 and of 4 and 5 tokens: exp(3·0.35) = 2.86 is kept, exp(1.4) and more are above 3."""
    batch = targets("trl_grpo")
    ratios = np.exp([GAP * sum(lengths) for lengths in LENGTHS])
    wanted = by_token([ratio if ratio <= 3.0 else 0.0 for ratio in ratios.tolist()])
    assert batch.correction is not None
    assert batch.correction[batch.valid.unsqueeze(-1)].tolist() == pytest.approx(wanted, rel=1e-5)
    assert {bool(x) for x in wanted} == {True, False}
    assert batch.weight.sum() == sum(map(sum, LENGTHS)), "rejected tokens count in the divisor"


def test_a_value_per_action_is_needed_only_where_a_value_is_used() -> None:
    data = collect(ToyPolicy())
    settings = AlgorithmSettings.model_validate(objective_preset("areal"))
    inputs = TargetInputs(ToyPolicy(), None, 1, 0, torch.device("cpu"))
    batch, _ = compute_targets(collate(data), settings, inputs)
    assert batch.advantage.shape == collate(data).logprob.shape
