"""Time of the native engine for groups that share a prompt, and for as many requests with prompts of their own.

    python bench/scripts/shared_prompts.py [--requests 64] [--group 8] [--prompt 256] [--answer 64] [--repeats 3]

A random Llama of 5 million parameters with 4,096 tokens; all requests begin at once. CPU time of this process, medians.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from polyrhythm.plugins.language.causal_lm.policy import CausalLm, CausalLmSettings
from polyrhythm.policies.engine import EngineRequest
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

_VOCABULARY = 4096


def policy_of(prompt: int, answer: int) -> CausalLm:
    integer = ArraySpec((), "int32")
    observation = {"tokens": ArraySpec((prompt,), "int32"), "length": integer, "turn": integer}
    action = ActionSpec("discrete", 1, choices=_VOCABULARY, stops=(0,))
    spec = EnvSpec(observation, action, (Task("text", "text"),), 1, chunk=answer)
    section = CausalLmSettings(layers=4, width=256, heads=8, hidden=1024)
    return section.build(spec, seed=0, device="cpu", role="act").eval()


def measure(policy: CausalLm, options: argparse.Namespace, group: int) -> tuple[float, float, int]:
    """Seconds of all requests and of their first step, and the tokens that were generated."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, _VOCABULARY, options.prompt).astype(np.int32) for _ in range(options.requests)]
    engine = policy.make_engine(options.requests)
    begin, first, tokens, left = time.process_time(), 0.0, 0, options.requests
    for i in range(options.requests):
        engine.add(EngineRequest(i, prompts[i // group], options.answer, False, i))
    while left:
        for found in engine.step():
            tokens += len(found.tokens)
            left -= 1
        first = first or time.process_time() - begin
    return time.process_time() - begin, first, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"requests": 64, "group": 8, "prompt": 256, "answer": 64, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    policy = policy_of(options.prompt, options.answer)
    measure(policy, options, options.group)
    for group, what in ((options.group, "shared"), (1, "own")):
        runs = sorted(measure(policy, options, group) for _ in range(options.repeats))
        seconds, first, tokens = runs[len(runs) // 2]
        sys.stdout.write(f"{what:8} {seconds:6.2f} s, first step {first:6.3f} s, {tokens / seconds:6.0f} tokens/s\n")


if __name__ == "__main__":
    main()
