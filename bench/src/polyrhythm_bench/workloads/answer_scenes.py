"""The scenes of `bench language` in which every mechanism of ROLL Flash is added in turn."""

from __future__ import annotations

from polyrhythm_bench.workloads.answers import AnswerScene

#: Lengths of 1,024 messages sampled from the trained policy of `quickstart_lm`: the means of twentieths of them
#: (`bench/scripts/native_costs.py`). Mean 42, longest 85.
RECIPE_TOKENS = "mixture:" + "+".join(
    f"0.05*constant:{length}steps"
    for length in (7, 10, 13, 17, 21, 24, 29, 32, 37, 41, 44, 47, 51, 55, 59, 62, 67, 70, 74, 77)
)
#: The native engine on that model, by the same script, eight times as long so that sleeping is exact: a decode step of
#: 0.55 ms + 0.032 ms for each message, 0.44 ms for each prompt, which the eight members of a group share.
NATIVE_COSTS = {"prefill": "0.8ms+0.44ms", "decode": "4.4ms+0.25ms"}
#: Milliseconds of a token in an update by one device, eight times as long: 0.82 s for 256 messages of 46 tokens.
NATIVE_UPDATE_MS = 0.55

#: What ROLL Flash publishes, shortened by one factor. plain: 256 answers with lengths of σ 1, training 30% of a version
#: in lock-step (§1: rollout is over 70%). filtered: figure 7, 8 prompts × 8 answers, 16 more prompts where answers are
#: queued, prompts without variance replaced (40% here, not published), the same share of training. recipe: the lengths
#: and costs of `quickstart_lm`; native: its costs with lengths of σ 1.
SCENES: dict[str, AnswerScene] = {
    "plain": AnswerScene(prompts=32),
    "filtered": AnswerScene(solved=0.2, hopeless=0.2, extra_prompts=16),
    "recipe": AnswerScene(
        prompts=32, tokens=RECIPE_TOKENS, update_ms=round(NATIVE_UPDATE_MS * 256 * 42 / 8), **NATIVE_COSTS
    ),
    "native": AnswerScene(prompts=32, update_ms=round(NATIVE_UPDATE_MS * 256 * 60 / 8), **NATIVE_COSTS),
}

#: For a try: few stations and answers, and the modes that differ most.
TINY_SCENE = AnswerScene(prompts=8, group=4, devices=4, training_devices=2, update_ms=300)
TINY_MODES = ("lockstep", "queue", "alpha_1_continue")
