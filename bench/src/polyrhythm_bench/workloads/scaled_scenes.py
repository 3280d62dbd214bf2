"""Figure 1b of ROLL Flash: Qwen3-8B on 16 to 128 GPUs, with costs that follow from the GPU and the model.

The paper gives the sizes (256 prompts × 16 answers an update, at most 30,720 tokens, 2k and 11k on average,
asynchronous ratio 2) and neither the GPU nor times. Here it is one of 80 GiB, 3.35 TB/s and 989 TFLOP/s in bfloat16
(H100 SXM):

- a decode step reads all weights and the keys and values of all answers under way, at 70% of the bandwidth; contexts
  are those of the mean token;
- a generator has places for as many answers as have their keys and values in 90% of its memory beside the weights;
- an update takes 10 operations per parameter and token (forward, backward, and the two further passes that the paper
  has, of the initial and of the proximal policy), at 40% of the peak.

Lengths are lognormal with σ 1, each its own. Nothing is fitted to the published gains.
"""

from __future__ import annotations

from typing import NamedTuple

from polyrhythm_bench.workloads.answers import AnswerScene

GPUS = (16, 32, 64, 128)
#: Shares of the GPUs that train where training and rollout overlap.
TRAINING_SHARES = (0.125, 0.25, 0.5)
PROMPTS, GROUP, LONGEST = 256, 16, 30_720
#: A decode step of the sleeping engine is so many tokens.
TOKENS_A_STEP = 64

_BANDWIDTH, _OPERATIONS, _MEMORY = 0.7 * 3.35e12, 0.4 * 989e12, 0.9 * 80 * 2**30
_PARAMETERS, _PARAMETER_BYTES, _OPERATIONS_A_TOKEN = 8.19e9, 2, 10
#: Keys and values of a token: 36 layers × 8 heads × 128 × 2, in bfloat16.
_CACHE_BYTES = 36 * 8 * 128 * 2 * 2


class AnswerLengths(NamedTuple):
    """mean: of answers, in tokens, as published; uncut: that of the distribution before it is cut; context: mean
    position of a token, E[L²] / 2 E[L]. published: gain on 128 GPUs. shortened: all times are divided by it."""

    mean: int
    uncut: float
    context: float
    published: float
    shortened: int


MODELS = {
    "base": AnswerLengths(2_000, 2_006.5, 2_570.0, 2.24, 10),
    "think": AnswerLengths(11_000, 12_973.0, 9_190.0, 2.13, 20),
}


def scaled(model: str, gpus: int, training: int, *, per_station: int = 1) -> AnswerScene:
    """Training of such a model on so many GPUs, of which `training` train where training and rollout overlap."""
    lengths = MODELS[model]
    read_s = _PARAMETERS * _PARAMETER_BYTES / _BANDWIDTH, lengths.context * _CACHE_BYTES / _BANDWIDTH
    step, answer = (1e3 * TOKENS_A_STEP * seconds / lengths.shortened for seconds in read_s)
    places = (_MEMORY - _PARAMETERS * _PARAMETER_BYTES) / (lengths.context * _CACHE_BYTES)
    tokens = PROMPTS * GROUP * lengths.mean
    update_s = _OPERATIONS_A_TOKEN * _PARAMETERS * tokens / (gpus * _OPERATIONS)
    return AnswerScene(
        prompts=PROMPTS,
        group=GROUP,
        devices=gpus,
        training_devices=training,
        per_station=per_station,
        places=int(places),
        tokens=f"lognormal:{lengths.uncut / TOKENS_A_STEP:.3f}steps:1.0",
        longest=LONGEST // TOKENS_A_STEP,
        prefill="0ms",
        decode=f"{step:.4f}ms+{answer:.5f}ms",
        update_ms=round(1e3 * update_s / lengths.shortened),
    )


#: Share of the answers to a prompt that are equally long: halfway between independent lengths and one for each prompt.
ALIKE = 0.5


def with_contexts(scene: AnswerScene, model: str) -> AnswerScene:
    """The scene with two things that a sleeping engine does not have: a decode step reads the keys and values of each
    answer as far as it has come, and a share of the answers to a prompt are equally long."""
    shortened = MODELS[model].shortened
    weights_ms = 1e3 * TOKENS_A_STEP * _PARAMETERS * _PARAMETER_BYTES / _BANDWIDTH / shortened
    cache_ms = 1e3 * TOKENS_A_STEP**2 * _CACHE_BYTES / _BANDWIDTH / shortened
    costs = {"decode": f"{weights_ms:.4f}ms", "context": f"{cache_ms:.9f}ms"}
    return scene.model_copy(update={**costs, "same_tokens": ALIKE})
