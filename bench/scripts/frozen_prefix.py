"""Writes bench/results/frozen_prefix.md: an update with the frozen prefix computed once per sample, and once per epoch.

    python bench/scripts/frozen_prefix.py [--device cuda] [--epochs 4] [--repeats 5] [--out FILE]

The policy has the form of pi0 at a small size: a frozen backbone over 128 tokens, and an action expert that attends to
its keys and values. Both ways begin with the same weights and samples, in turns; times are medians of whole updates.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.plugins.pretrained.adapting import Adaptation, AdaptedPolicy
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import Decoder, DecoderSize
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs import Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish

TOKENS, WIDTH, LAYERS, ACTIONS, EXPERT = 128, 256, 6, 8, 64


class Network(nn.Module):
    """Backbone, and an expert with one query per action entry."""

    def __init__(self) -> None:
        super().__init__()
        same = {"layers": LAYERS, "heads": 4, "kv_heads": 1, "head_dim": 32, "activation": "gelu_tanh"}
        self.backbone = Decoder(DecoderSize(width=WIDTH, mlp=4 * WIDTH, **same))  # type: ignore[arg-type]
        self.expert = Decoder(DecoderSize(width=EXPERT, mlp=4 * EXPERT, **same))  # type: ignore[arg-type]
        self.queries = nn.Parameter(torch.randn(ACTIONS, EXPERT))
        self.head = nn.Linear(EXPERT, 1)


class EveryEpoch(AdaptedPolicy):
    """Gaussian actions of unit deviation; the backbone runs in every pass."""

    chunk, action_dim, exact, tolerance = 1, ACTIONS, False, 1e-4

    def __init__(self) -> None:
        super().__init__()
        self.network, self.critic = Network(), nn.Linear(WIDTH, 1)

    def prefix(self, obs: Observations) -> dict[str, Tensor]:
        """Keys and values by layer, and features."""
        x = obs["tokens"]
        places = torch.arange(TOKENS, device=x.device).expand(len(x), -1)
        hidden, found = self.network.backbone(x, places, None)  # type: ignore[operator]
        return {f"prefix.{i}": torch.cat(pair, dim=1) for i, pair in enumerate(found)} | {"features": hidden.mean(1)}

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        seen = obs if "features" in obs else self.prefix(obs)
        past = [tuple(seen[f"prefix.{i}"].split(1, dim=1)) for i in range(LAYERS)]
        queries = self.network.queries.expand(len(seen["features"]), -1, -1)  # type: ignore[operator]
        places = TOKENS + torch.arange(ACTIONS, device=queries.device).expand(len(queries), -1)
        mean = self.network.head(self.network.expert(queries, places, None, past=past)[0])  # type: ignore[operator]
        logprob = -0.5 * (forward_inputs["raw"] - mean.transpose(1, 2)).square()
        return Evaluation(logprob, self.critic(seen["features"]).squeeze(1), torch.zeros_like(logprob))

    def value(self, obs: Observations) -> Tensor:
        return self.critic((obs if "features" in obs else self.prefix(obs))["features"]).squeeze(1)


class OncePerSample(EveryEpoch):
    """The same with what the learner asks for."""

    def precompute(self, obs: Observations) -> dict[str, Tensor]:
        return self.prefix(obs)


def build(kind: type[EveryEpoch], device: str) -> EveryEpoch:
    with seeded(0):
        policy = kind()
    parts = {"expert": ("expert.*", "queries", "head.*")}
    adaptation = Adaptation("expert", parts, Precision(torch.float32))
    adaptation.prepare(policy.network, "train")
    adaptation.finish(policy.network, "train", 0)
    return policy.to(device)


def samples(count: int, steps: int) -> list[Trajectory]:
    """Samples of random observations and actions."""
    rng = np.random.default_rng(0)
    shape = (steps, 1, ACTIONS)
    return [
        Trajectory(
            obs={"tokens": rng.normal(size=(steps + 1, TOKENS, WIDTH)).astype(np.float32)},
            actions=np.zeros(shape, np.float32),
            logprob=np.full(shape, -0.5, np.float32),
            value=np.zeros(steps, np.float32),
            forward_inputs={"raw": rng.normal(size=shape).astype(np.float32)},
            rewards=rng.normal(size=(steps, 1)).astype(np.float32),
            valid=np.ones((steps, 1), np.bool_),
            version=np.zeros(steps, np.int64),
            terminated=True,
            truncated=False,
            success=False,
            env_steps=steps,
            ticket=i,
            group=i,
            task=0,
        )
        for i in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "frozen_prefix.md")
    given = parser.parse_args()
    settings = {"versions": 1, "mini_batch_samples": 8, "minibatch_steps": 32, "max_kl": None, "micro_batch_steps": 16}
    training = TrainingSettings.model_validate({**settings, "epochs": given.epochs})
    algorithm = AlgorithmSettings.model_validate({})
    data = samples(8, 16)
    kinds = (EveryEpoch, OncePerSample)
    learners = [Learner(build(kind, given.device), algorithm, training, total_updates=99, seed=0) for kind in kinds]
    seconds: list[list[float]] = [[], []]
    for repeat in range(given.repeats + 1):
        for place, learner in enumerate(learners):
            begin = time.perf_counter()
            finish(learner.update(data, repeat))
            if repeat:  # the first warms up
                seconds[place].append(time.perf_counter() - begin)
    first, second = (dict(learner.policy.state_dict()) for learner in learners)
    gap = max(float((first[name] - x).abs().max()) for name, x in second.items())
    every, once = map(statistics.median, seconds)
    numbers = [sum(p.numel() for p in part.parameters()) / 1e6 for part in learners[0].policy.network.children()]  # type: ignore[attr-defined]
    bytes_per_step = 4 * (WIDTH + LAYERS * 2 * 32 * TOKENS)
    given.out.write_text(
        f"""# A frozen prefix, computed once per sample

`python bench/scripts/frozen_prefix.py --device {given.device} --epochs {given.epochs} --repeats {given.repeats}`,
{dt.datetime.now().astimezone().date()}; torch {torch.__version__}, {torch.get_num_threads()} thread(s) on the CPU.

Backbone {numbers[0]:.1f}M parameters over {TOKENS} tokens, frozen; expert {numbers[1]:.2f}M, trained. 128 chunk steps,
{given.epochs} epochs, 32 per optimizer step, 16 per pass, float32. Kept per step: {bytes_per_step / 2**10:.0f} KiB.

| prefix | update, median of {given.repeats} [s] | least and most [s] |
|---|---|---|
| in every epoch | {every:.2f} | {min(seconds[0]):.2f} to {max(seconds[0]):.2f} |
| once per sample | {once:.2f} | {min(seconds[1]):.2f} to {max(seconds[1]):.2f} |

Gain: **{every / once:.2f}×**. Largest difference of a weight after {given.repeats + 1} updates: {gap:.1g}.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
