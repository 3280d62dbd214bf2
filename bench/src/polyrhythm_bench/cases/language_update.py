"""Tokens per second and memory of an update of `causal_lm`, packed and padded.

    python -m polyrhythm_bench.cases.language_update [--rows 64] [--median 60] [--sigma 1] [--longest 1024]
        [--width 256] [--layers 4] [--hidden 1024] [--vocabulary 4096] [--micro-batch-steps N] [--micro-batch-tokens N]
        [--train all] [--repeats 3] [--device cpu] [--way packed]

Prompts and messages have lognormal lengths, cut at half of `longest` each. packed: as the policy trains.
padded: each micro-batch in one batch, padded to its longest row, as without packing; logits of the messages' tokens in
both. Each way runs in a process of its own. Tokens are those of prompts and messages, CPU time that of the process.
memory: by how much the process grew at most in an update, of a GPU what torch allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE, CausalLm, CausalLmSettings
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task, Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish

WAYS = ("packed", "padded")


class Padded(CausalLm):
    """The policy without packing."""

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        message = forward_inputs[MESSAGE].long()
        lengths, counts = obs["length"].long(), self._counts(message)
        row, column = (torch.arange(message.shape[1], device=message.device) < counts[:, None]).nonzero(as_tuple=True)
        sequence = message.new_zeros(len(message), int((lengths + counts).max()))
        size = min(obs["tokens"].shape[1], sequence.shape[1])
        sequence[:, :size] = obs["tokens"][:, :size]
        sequence[row, lengths[row] + column] = message[row, column]
        hidden = self.network.model.base_model(input_ids=sequence[:, :-1], use_cache=False).last_hidden_state  # type: ignore[operator]
        features = hidden[row, lengths[row] + column - 1]
        scores = self._scores(features, message[row, column], self.sampling, with_entropy=True)
        zeros, place = torch.zeros(message.shape, device=message.device), (row, column)
        logprob, entropy = (zeros.index_put(place, flat).unsqueeze(-1) for flat in scores)
        return Evaluation(logprob, zeros[:, 0], entropy)


def spec_of(options: argparse.Namespace) -> EnvSpec:
    half = options.longest // 2
    integer = ArraySpec((), "int32")
    observation = {"tokens": ArraySpec((half,), "int32"), "length": integer, "turn": integer}
    action = ActionSpec("discrete", 1, choices=options.vocabulary, stops=(0,))
    return EnvSpec(observation, action, (Task("text", "text"),), 1, chunk=half)


def samples(options: argparse.Namespace) -> list[Trajectory]:
    """One chunk step each, in groups of 8."""
    rng, half = np.random.default_rng(0), options.longest // 2
    lengths = np.clip(rng.lognormal(np.log(options.median), options.sigma, (options.rows, 2)), 2, half).astype(int)
    found = []
    for i, (prompt, count) in enumerate(lengths):
        tokens = np.zeros((2, half), np.int32)
        tokens[:, :prompt] = rng.integers(1, options.vocabulary, prompt)
        message = np.zeros((1, half), np.int32)
        message[0, : count - 1] = rng.integers(1, options.vocabulary, count - 1)
        valid = np.arange(half)[None] < count
        found.append(
            Trajectory(
                obs={"tokens": tokens, "length": np.full(2, prompt, np.int32), "turn": np.zeros(2, np.int32)},
                actions=message[..., None],
                logprob=np.where(valid, -np.log(options.vocabulary), 0.0).astype(np.float32)[..., None],
                value=np.zeros(1, np.float32),
                forward_inputs={"message": message},
                rewards=(rng.random() * (np.arange(half) == count - 1)).astype(np.float32)[None],
                valid=valid,
                version=np.zeros(1, np.int64),
                terminated=True,
                truncated=False,
                success=True,
                env_steps=1,
                ticket=i,
                group=i // 8,
                task=0,
            )
        )
    return found


def resident(line: str) -> int:
    """Bytes by /proc/self/status, `VmRSS` now or `VmHWM` at most."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return 1024 * int(found[1])


def measure(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """One way, in this process: the result after each repeat."""
    spec = spec_of(options)
    section = CausalLmSettings(
        layers=options.layers,
        width=options.width,
        heads=options.width // (32 if options.width < 1024 else 64),
        hidden=options.hidden or 4 * options.width,
        train=options.train,
        gradient_checkpointing=options.train == "lora",
    )
    policy = section.build(spec, seed=0, device="cpu", role="train")
    if options.way == "padded":
        policy = Padded(section, spec, policy.network)
    bounds = {"micro_batch_steps": options.micro_batch_steps, "micro_batch_tokens": options.micro_batch_tokens}
    training = {"versions": 10, "mini_batch_samples": options.rows, "epochs": 1, "minibatch_steps": 0, "max_kl": None}
    learner = Learner(
        policy.to(options.device),
        AlgorithmSettings.model_validate({"advantage": "grpo", "loss": "ppo", "value": {"coef": 0.0}}),
        TrainingSettings.model_validate(
            {**training, "optimizer": {"lr": 1e-5}, **{name: x for name, x in bounds.items() if x}}
        ),
        total_updates=10,
        seed=0,
    )
    batch = samples(options)
    tokens = sum(int(x.obs["length"][0]) + int(x.valid.sum()) - 1 for x in batch)
    finish(learner.update(batch[:16], 0))
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, times = resident("VmRSS"), []
    for _ in range(options.repeats):
        begin = time.process_time() if options.device == "cpu" else time.perf_counter()
        finish(learner.update(batch, 0))
        if options.device != "cpu":
            torch.cuda.synchronize()
        times.append((time.process_time() if options.device == "cpu" else time.perf_counter()) - begin)
        held = resident("VmHWM") - before if options.device == "cpu" else torch.cuda.max_memory_allocated()
        yield {"tokens": tokens, "tokens_s": tokens / sorted(times)[len(times) // 2], "memory_mb": held / 1e6}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {
        "rows": 64,
        "median": 60,
        "longest": 1024,
        "width": 256,
        "layers": 4,
        "vocabulary": 4096,
        "repeats": 3,
        "hidden": 0,
    }
    for name, default in {**sizes, "micro-batch-steps": 0, "micro-batch-tokens": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", choices=("all", "lora"), default="all", help="lora recomputes activations, too")
    parser.add_argument("--way", choices=WAYS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.way:
        for found in measure(options):
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
        return
    freed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # so that the peak is what is held
    for way in WAYS:
        words = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--way", way]
        done = subprocess.run(  # noqa: S603
            words, env={**os.environ, **freed}, capture_output=True, text=True, check=True
        )
        sys.stdout.write(f"{way} {done.stdout.splitlines()[-1]}\n")


if __name__ == "__main__":
    main()
