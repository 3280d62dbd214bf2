"""Engines beside each other on one small model: tokens per second at several numbers of sequences, in one process."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from polyrhythm_bench.workloads.token_engines import VOCABULARY, Generate, all_of

log = logging.getLogger(__name__)

SEQUENCES = (1, 8, 32, 64)
#: Tokens of a prompt, and of each answer.
PROMPT, NEW = 16, 128
#: Least tokens per second: of vLLM through us as a fraction of bare vLLM's, of the native engine of transformers'.
VLLM, NATIVE = 0.95, 1.0


#: Tokens per second by engine, number of sequences and turn.
Rates = Mapping[str, Mapping[int, Sequence[float]]]


def run(repeats: int = 3, sequences: Sequence[int] = SEQUENCES) -> dict[str, Any]:
    """All engines that can run here, in interleaved turns: what `summarise` returns."""
    with all_of(max(sequences), PROMPT + NEW) as engines:
        rates = _measure(engines, repeats, sequences)
    return {"prompt": PROMPT, "new": NEW, "repeats": repeats, **summarise(rates)}


def _measure(engines: Mapping[str, Generate], repeats: int, sequences: Sequence[int]) -> Rates:
    rates: dict[str, dict[int, list[float]]] = {name: {count: [] for count in sequences} for name in engines}
    for generate in engines.values():
        for count in sequences:
            generate(_prompts(count, -1), 8)  # compiled and allocated
    for turn in range(repeats):
        for count in sequences:
            for name, generate in engines.items():
                rates[name][count].append(_rate(generate, count, turn))
            told = ", ".join(f"{name} {rates[name][count][-1]:.0f}" for name in engines)
            log.info("turn %d, %d sequences, tokens/s: %s", turn + 1, count, told)
    return rates


def _prompts(count: int, turn: int) -> list[list[int]]:
    rng = random.Random(f"{count}/{turn}")
    return [[rng.randrange(1, VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]


def _rate(generate: Generate, count: int, turn: int) -> float:
    prompts = _prompts(count, turn)
    begin = time.monotonic()
    tokens = generate(prompts, NEW)
    seconds = time.monotonic() - begin
    assert tokens == count * NEW, f"{tokens} tokens in place of {count * NEW}"
    return tokens / seconds


def summarise(rates: Rates) -> dict[str, Any]:
    """`tokens_per_s`: medians, a record for each number of sequences; `ratios`: medians of ratios in the same turn, of
    vLLM through us to bare vLLM and of the native engine to the others; `within_limits`."""
    counts = list(next(iter(rates.values())))
    table = [{"sequences": count} | {name: median(own[count]) for name, own in rates.items()} for count in counts]
    ratios = [
        {"sequences": count} | {f"{mine}/{other}": _ratio(rates, mine, other, count) for mine, other in _pairs(rates)}
        for count in counts
    ]
    bars = {"vllm/bare_vllm": VLLM, "native/generate": NATIVE, "native/continuous_batching": NATIVE}
    within = {name: all(row[name] >= bar for row in ratios) for name, bar in bars.items() if name in ratios[0]}
    return {"tokens_per_s": table, "ratios": ratios, "within_limits": within}


def _pairs(rates: Rates) -> list[tuple[str, str]]:
    pairs = [("vllm", "bare_vllm"), ("vllm", "bare_vllm_no_logprobs"), ("native", "vllm")]
    pairs += [("native", "generate"), ("native", "continuous_batching")]
    return [(mine, other) for mine, other in pairs if mine in rates and other in rates]


def _ratio(rates: Rates, mine: str, other: str, count: int) -> float:
    return median(a / b for a, b in zip(rates[mine][count], rates[other][count], strict=True))
