"""Lengths of a language run's sampled messages, and costs of the native engine on its model: for `bench language`.

    python bench/scripts/native_costs.py RUN [--messages 1024] [--repeats 5]

lengths: the means of twentieths of the sorted lengths, as a mixture. decode: of a step, fitted to the medians over the
repeats at 1, 8, 32, 64 and 128 messages under way, all of them 16 tokens or more from their ends; prefill: of a step
that reads prompts, likewise, less the decode step in it. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.config.load import load_config
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.plugins.language.causal_lm.engine import NativeEngine
from polyrhythm.plugins.language.causal_lm.policy import CausalLm
from polyrhythm.policies.engine import EngineRequest

COUNTS = (1, 8, 32, 64, 128)
_STEPS, _PARTS = 16, 20


def prompts_of(run: Path, count: int) -> tuple[CausalLm, list[NDArray[np.int32]]]:
    """The trained policy, and prompts of its environment."""
    config = load_config(str(run / "config.yaml"), [])
    spec = config.env.spec()
    policy = config.policy.build(spec, seed=0, device="cpu", role="act")
    assert isinstance(policy, CausalLm)
    policy.load_state_dict(load_policy(run / "policy.pt")[1], strict=False)
    batch = config.env.build(count)
    batch.reset(range(count), [0] * count, range(count))
    obs = {name: np.zeros((count, *array.shape), array.dtype) for name, array in spec.observation.items()}
    batch.observe(range(count), obs)
    batch.close()
    lengths = obs["length"].reshape(count)
    return policy, [obs["tokens"][row, : lengths[row]].astype(np.int32) for row in range(count)]


def engine_of(policy: CausalLm, prompts: list[NDArray[np.int32]]) -> NativeEngine:
    """The native engine with these prompts added."""
    engine = policy.make_engine(len(prompts))
    assert isinstance(engine, NativeEngine)
    engine.weights_changed(0)
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(number, prompt, policy.chunk, False, 7919 * number + 5))
    return engine


def lengths_of(policy: CausalLm, prompts: list[NDArray[np.int32]]) -> list[int]:
    """Sorted lengths of the messages."""
    engine = engine_of(policy, prompts)
    found: list[int] = []
    while len(found) < len(prompts):
        found += [len(one.tokens) for one in engine.step()]
    return sorted(found)


def costs_of(policy: CausalLm, prompts: list[NDArray[np.int32]], count: int) -> tuple[float, float]:
    """Seconds of the first step, which reads the prompts, and the median of steps after it."""
    engine = engine_of(policy, prompts[:count])
    begin = time.perf_counter()
    engine.step()
    first = time.perf_counter() - begin
    steps = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        if engine.step():
            break
        steps.append(time.perf_counter() - begin)
    return first, median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--messages", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy, prompts = prompts_of(options.run, max(options.messages, *COUNTS))
    with torch.inference_mode():
        lengths = lengths_of(policy, prompts)
        longest = [prompt for prompt, _ in sorted(zip(prompts, map(len, prompts), strict=True), key=lambda p: -p[1])]
        turns = [{count: costs_of(policy, longest, count) for count in COUNTS} for _ in range(options.repeats)]
    decode = {count: median(turn[count][1] for turn in turns) for count in COUNTS}
    prefill = {count: median(turn[count][0] for turn in turns) - decode[count] for count in COUNTS}
    parts = [float(part.mean()) for part in np.array_split(np.array(lengths), _PARTS)]
    found = {
        "mean": float(np.mean(lengths)),
        "sigma_of_logarithm": float(np.std(np.log(lengths))),
        "longest": lengths[-1],
        "lengths": "mixture:" + "+".join(f"{1 / _PARTS}*constant:{part:.0f}steps" for part in parts),
        "decode_ms": {count: 1e3 * cost for count, cost in decode.items()},
        "decode_fit_ms": _fit(decode),
        "prefill_ms": {count: 1e3 * cost for count, cost in prefill.items()},
        "prefill_fit_ms": _fit(prefill),
    }
    print(json.dumps(found, indent=1))


def _fit(costs: dict[int, float]) -> list[float]:
    """Milliseconds: base and per message."""
    slope, base = np.polyfit(list(costs), [1e3 * cost for cost in costs.values()], 1)
    return [float(base), float(slope)]


if __name__ == "__main__":
    main()
