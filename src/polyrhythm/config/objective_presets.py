"""Objectives of other systems: whole `algorithm` sections, by name.

`objective: NAME` in a recipe stands for the named section in place of the inherited one; what the recipe says itself
under `algorithm` lies over it. `objective=NAME` on the command line takes the place of the recipe's section, under the
other overrides. The resolved configuration has the settings, and the name as `objective`. Only the loss is set:
learning rates, epochs, group size and a policy's own settings (flow_noise's `logprob: mean` for RLinf's joint_logprob)
stay the recipe's.
docs/from-other-systems.md maps setting by setting. tests/training/test_objective_presets.py compares two updates of
each with a plain loop of the system's formulas.
"""

from __future__ import annotations

import copy
from typing import Any

from polyrhythm.config.nearest import nearest
from polyrhythm.errors import ConfigError

Tree = dict[str, Any]

_RLINF_PPO = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "advantage": "gae",
    "normalize_advantage": True,
    "advantage_std": "sample",
    "normalize_rewards": False,
    "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    "proximal": "behavior",
}
_RLINF_CRITIC = {"coef": 1.0, "clip": 0.2, "huber": 10.0, "aggregation": "policy"}
#: Episodes end where the task does, and are masked from there on: RLinf's environments without auto_reset.
_RLINF_EPISODES = {"bootstrap": "never", "aggregation": "episode_mean"}
_NO_CRITIC = {"coef": 0.0}
#: The loss of RLinf's asynchronous trainer, without the upper clip.
_RLINF_DECOUPLED = {"type": "decoupled_ppo", "clip_low": 0.2, "dual_clip": 3.0, "behave_weight_threshold": 2.0}

#: Name → what it is (the configuration that it was read from), and the `algorithm` section.
OBJECTIVE_PRESETS: dict[str, tuple[str, Tree]] = {
    # RLinf/RLinf a3816b5: examples/embodiment/config/libero_{spatial,object,goal,10}_ppo_openpi.yaml and …_pi05.yaml,
    # env/libero_*.yaml (auto_reset false). No dual clip: embodied_fsdp_actor_worker.py passes clip_ratio_c on for GR00T
    # N1.6 and N1.7 only.
    "rlinf_libero": (
        "RLinf's PPO on LIBERO for flow policies (libero_*_ppo_openpi, _gr00t)",
        {
            **_RLINF_PPO,
            **_RLINF_EPISODES,
            "logprob_level": "chunk",
            "reward_level": "chunk",
            "value": _RLINF_CRITIC,
        },
    ),
    # RLinf/RLinf a3816b5: examples/embodiment/config/libero_*_async_ppo_*.yaml (two of them have threshold 5);
    # rlinf/workers/actor/async_ppo_fsdp_worker.py interpolates where recompute_logprobs is false.
    "rlinf_libero_async": (
        "RLinf's asynchronous PPO on LIBERO (libero_*_async_ppo_*)",
        {
            **_RLINF_PPO,
            **_RLINF_EPISODES,
            "loss": {**_RLINF_DECOUPLED, "clip_high": 0.2},
            "proximal": "interpolate",
            "logprob_level": "chunk",
            "reward_level": "chunk",
            "value": _RLINF_CRITIC,
        },
    ),
    # RLinf/RLinf a3816b5: examples/embodiment/config/libero_*_grpo_openvlaoft.yaml; the synchronous worker does not
    # whiten them again. reward_level chunk gives the same: the advantage is constant over a trajectory.
    "rlinf_libero_grpo": (
        "RLinf's GRPO on LIBERO for token policies (libero_*_grpo_openvlaoft)",
        {
            **_RLINF_EPISODES,
            "advantage": {"type": "grpo", "std": "sample"},
            "normalize_advantage": False,
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28},
            "proximal": "behavior",
            "logprob_level": "token",
            "value": _NO_CRITIC,
        },
    ),
    # Ours: the advantage of rlinf_libero_grpo with the loss of rlinf_libero_async. No file of RLinf/RLinf a3816b5 is
    # both: of the PPO losses its asynchronous runner takes decoupled_actor_critic alone (train_async.py).
    "rlinf_libero_grpo_async": (
        "RLinf's GRPO on LIBERO with the loss of its asynchronous PPO, a combination of ours",
        {
            **_RLINF_EPISODES,
            "advantage": {"type": "grpo", "std": "sample"},
            "normalize_advantage": False,
            "loss": {**_RLINF_DECOUPLED, "clip_high": 0.28},
            "proximal": "interpolate",
            "logprob_level": "token",
            "value": _NO_CRITIC,
        },
    ),
    # RLinf/RLinf a3816b5: examples/embodiment/config/maniskill_ppo_openvlaoft.yaml (auto_reset true: no mask, so
    # rlinf/algorithms/losses.py takes the mean over all entries).
    "rlinf_maniskill": (
        "RLinf's PPO on ManiSkill for token policies (maniskill_ppo_openvlaoft)",
        {
            **_RLINF_PPO,
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28},
            "bootstrap": "always",
            "logprob_level": "token",
            "reward_level": "action",
            "aggregation": "token_mean",
            "value": _RLINF_CRITIC,
        },
    ),
    # verl-project/verl 1dda039: verl/trainer/config/_generated_ppo_trainer.yaml; clip_ratio_c is always on
    # (verl/trainer/ppo/core_algos.py). The critic has an optimizer of its own, so its weight is 1, and a value for each
    # token; advantages are whitened over tokens.
    "verl_ppo": (
        "verl's defaults (trainer/config/ppo_trainer.yaml)",
        {
            "gamma": 1.0,
            "gae_lambda": 1.0,
            "advantage": "gae",
            "normalize_advantage": True,
            "advantage_std": "sample",
            "normalize_rewards": False,
            "bootstrap": "never",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "proximal": "recompute",
            "logprob_level": "token",
            "reward_level": "action",
            "aggregation": "token_mean",
            "value": {"coef": 1.0, "clip": 0.5, "aggregation": "policy"},
        },
    ),
    # verl-project/verl 1dda039: docs/algo/grpo.md; kl_loss_coef, kl_loss_type: verl/trainer/config/actor/actor.yaml;
    # the cap of k3: verl/trainer/ppo/core_algos.py.
    "verl_grpo": (
        "verl's GRPO (docs/algo/grpo.md: its defaults with adv_estimator grpo and use_kl_loss)",
        {
            "advantage": {"type": "grpo", "std": "sample"},
            "normalize_advantage": False,
            "bootstrap": "never",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "proximal": "recompute",
            "logprob_level": "token",
            "aggregation": "token_mean",
            "value": _NO_CRITIC,
            "kl": {"coef": 0.001, "estimator": "k3", "cap": 10.0, "place": "loss"},
        },
    ),
    # inclusionAI/AReaL 4aef98d: examples/math/gsm8k_grpo.yaml; reward_norm by group, adv_norm by batch, kl_ctl 0.
    # adv_norm is over tokens (areal/trainer/ppo/actor.py): reward_level action.
    "areal": (
        "AReaL's decoupled GRPO (examples/math/gsm8k_grpo.yaml)",
        {
            "advantage": {"type": "grpo", "std": "sample"},
            "normalize_advantage": True,
            "advantage_std": "sample",
            "bootstrap": "never",
            "loss": {"type": "decoupled_ppo", "clip_low": 0.4, "clip_high": 0.4, "behave_weight_threshold": 5.0},
            "proximal": "recompute",
            "logprob_level": "token",
            "reward_level": "action",
            "aggregation": "token_mean",
            "value": _NO_CRITIC,
        },
    ),
    # alibaba/ROLL 8eb27cc: examples/qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml; dual clip 1 + 2·pg_clip
    # (roll/pipeline/rlvr/actor_worker.py), loss_agg_mode of roll/configs/base_config.py; add_token_level_kl is false.
    # Advantages are whitened over tokens (roll/utils/functionals.py): reward_level action.
    "roll": (
        "ROLL's asynchronous REINFORCE (examples/qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml)",
        {
            "gamma": 1.0,
            "advantage": {"type": "reinforce_plus_plus", "returns": "to_go"},
            "normalize_advantage": True,
            "advantage_std": "sample",
            "advantage_clip": 2.0,
            "bootstrap": "never",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.4},
            "proximal": "recompute",
            "logprob_level": "token",
            "reward_level": "action",
            "aggregation": "trajectory_mean",
            "value": _NO_CRITIC,
        },
    ),
    # huggingface/trl f2cd577: trl/trainer/grpo_config.py, grpo_trainer.py; loss_type dapo, sequence_mask, clip_max 3.
    # Its sequence is a whole conversation: the ratio is a product over the tokens of all turns.
    "trl_grpo": (
        "TRL's defaults (GRPOConfig, generation by vLLM)",
        {
            "advantage": {"type": "grpo", "std": "sample", "epsilon": 1.0e-4},
            "normalize_advantage": False,
            "bootstrap": "never",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2},
            "proximal": "recompute",
            "rollout_correction": {
                "weight": "trajectory",
                "weight_by": "product",
                "reject": "ratio",
                "reject_level": "trajectory",
                "reject_by": "sum",
                "reject_above": 3.0,
            },
            "logprob_level": "token",
            "aggregation": "token_mean",
            "value": _NO_CRITIC,
        },
    ),
}


def objective_preset(name: Any, origin: str = "") -> Tree:
    """The `algorithm` section of an objective. ConfigError: there is none of this name."""
    if not isinstance(name, str) or name not in OBJECTIVE_PRESETS:
        names = sorted(OBJECTIVE_PRESETS)
        near = nearest(name, names) if isinstance(name, str) else ""
        raise ConfigError(f"objective = {name}: {near}objectives are {', '.join(names)}", origin=origin)
    return copy.deepcopy(OBJECTIVE_PRESETS[name][1])
