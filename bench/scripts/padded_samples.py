"""CPU milliseconds in which a trainer makes a batch of samples that come pickled one by one, as in verl's recipe.

A sample is 16 answers, padded to 2,048 + 28,672 tokens: 21 MB. The batch is unpickled, concatenated and put into
another order. Result: medians of the turns, for each sample.
"""

from __future__ import annotations

import pickle
import time
from statistics import median

import torch

ANSWERS, PROMPT, ANSWER, SAMPLES, TURNS = 16, 2_048, 28_672, 16, 5
WIDTHS = {
    "prompts": PROMPT,
    "responses": ANSWER,
    "response_mask": ANSWER,
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), PROMPT + ANSWER),
}


def batch_s(pickled: list[bytes]) -> float:
    """CPU seconds of a batch."""
    begun = time.process_time()
    samples = [pickle.loads(one) for one in pickled]  # noqa: S301 (its own)
    batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    order = torch.randperm(len(batch["responses"]))
    batch = {name: tensor[order] for name, tensor in batch.items()}
    batch["attention_mask"].sum(-1).tolist()
    return time.process_time() - begun


def main() -> None:
    sample = {name: torch.randint(0, 150_000, (ANSWERS, width)) for name, width in WIDTHS.items()}
    sample["rollout_log_probs"] = torch.rand(ANSWERS, ANSWER)
    pickled = [pickle.dumps(sample) for _ in range(SAMPLES)]
    print(f"{len(pickled[0]) / 1e6:.1f} MB a sample")
    print(f"{1e3 * median(batch_s(pickled) for _ in range(TURNS)) / SAMPLES:.1f} ms a sample")


if __name__ == "__main__":
    main()
