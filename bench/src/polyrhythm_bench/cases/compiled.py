"""A policy's passes compiled by `torch.compile` beside the plain ones: what it would gain, and what its start costs.

    python -m polyrhythm_bench.cases.compiled [--type pi0] [--size tiny] [--rows 1,32] [--device cpu] [--repeats 15]
        [--no-training]

Compiled are the network's methods that a pass calls. Plain and compiled passes have the same weights and inputs, and
take turns; on a GPU acting passes of both are captured as CUDA graphs, as a generator runs them. One line of JSON for
each pass, printed when it is measured: plain_ms and compiled_ms (medians), ratio (median of the turns), compile_s (the
clock of the first call, in which it is compiled), difference (the largest of log-probs and values, or of gradients
over the largest one, of the first thousand entries of each tensor).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, as_module
from polyrhythm_bench.cases.policies import SIZES, TRAIN_ROWS, TYPES, build_pair, choose_device, observations
from polyrhythm_bench.harness.roofline import seconds

Found = dict[str, str | float]

#: Methods of a network that its policy calls in a pass.
METHODS = dict.fromkeys(TYPES, ("prefix", "velocity")) | {"openvla_oft": ("features", "hidden", "token_logits")}


@contextmanager
def _compiled(policy: Policy, kind: str) -> Iterator[None]:
    """Within the block the network's methods are compiled ones."""
    network = policy.network  # type: ignore[attr-defined]
    for name in METHODS[kind]:
        setattr(network, name, torch.compile(getattr(network, name), dynamic=False))
    try:
        yield
    finally:
        for name in METHODS[kind]:
            delattr(network, name)


def compare(
    policy: Policy, kind: str, run: Callable[[], Tensor], device: torch.device, repeats: int, *, capture: bool
) -> dict[str, float]:
    """A pass, plain and compiled. run: makes it, and returns what is compared; capture: as a CUDA graph."""
    from polyrhythm.stations.passes import GraphCapture

    results, passes, first_s = [], [], []
    for context in (nullcontext(), _compiled(policy, kind)):
        with context:
            began = time.monotonic()
            results.append(run().clone())
            first_s.append(time.monotonic() - began)
            methods = {name: getattr(policy.network, name) for name in METHODS[kind]}  # type: ignore[attr-defined]
        call = partial(_with, policy, methods, run)
        passes.append(GraphCapture(device)(call) if capture else call)
    turns = []
    for turn in range(repeats + 1):
        order = passes if turn % 2 else passes[::-1]
        took = [seconds(one, device) for one in order]
        turns.append(took if turn % 2 else took[::-1])
    plain, other = zip(*turns[1:], strict=True)
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        "compiled_ms": 1e3 * statistics.median(other),
        "ratio": statistics.median(b / a for a, b in turns[1:]),
        "compile_s": first_s[1],
        "difference": float((results[0] - results[1]).abs().max()),
    }


def _with(policy: Policy, methods: dict[str, Callable[..., object]], run: Callable[[], Tensor]) -> None:
    """A pass with these methods of the network."""
    network = policy.network  # type: ignore[attr-defined]
    vars(network).update(methods)
    try:
        run()
    finally:
        for name in methods:
            delattr(network, name)


def measure(
    kind: str, size: str, rows: Sequence[int], device: torch.device, repeats: int
) -> Iterator[dict[str, object]]:
    """Acting with each of these numbers of rows, then a training micro-batch."""
    pair = build_pair(kind, size, device)
    policy, module = pair.policy, as_module(pair.policy)
    pair.reference.to("meta")  # room

    @torch.inference_mode()
    def act(count: int) -> Tensor:
        done = policy.act(obs, greedy[:count], keys[:count])
        return torch.cat((done.logprob.flatten().float(), done.value.flatten().float()))

    def train() -> Tensor:
        found = policy.evaluate(obs, kept)
        (found.logprob.sum() + found.value.sum() + found.entropy.sum()).backward()
        gradients = torch.cat([p.grad.flatten()[:1000].float() for p in module.parameters() if p.grad is not None])
        module.zero_grad(set_to_none=True)
        return gradients / gradients.abs().max()

    most = max(*rows, TRAIN_ROWS)
    keys = torch.arange(most, dtype=torch.int64, device=device)
    greedy = torch.zeros_like(keys, dtype=torch.bool)
    for count in rows:
        obs = observations(pair, count)
        found = compare(policy, kind, partial(act, count), device, repeats, capture=device.type == "cuda")
        yield {"pass": f"act, rows {count}", **found}
    obs = observations(pair, TRAIN_ROWS)
    kept = {n: x.clone() for n, x in policy.act(obs, greedy[:TRAIN_ROWS], keys[:TRAIN_ROWS]).forward_inputs.items()}
    yield {"pass": f"train, rows {TRAIN_ROWS}", **compare(policy, kind, train, device, repeats, capture=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--type", choices=TYPES, default="pi0")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-training", action="store_true", help="acting alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [int(count) for count in given.rows.split(",")]
    every = measure(given.type, given.size, rows, choose_device(given.device), given.repeats)
    for found in islice(every, len(rows)) if given.no_training else every:
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
