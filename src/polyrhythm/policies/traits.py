"""Declares the optional abilities of a policy, its settings and its engine. Imports no torch.

Our classes have an attribute `traits`. For a class without one, `policy_traits` and `settings_traits` infer it from
methods and attributes; no other code inspects objects for abilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

#: Sampling settings of the policies that draw tokens (`SettingsTraits.sampling`).
SAMPLING = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """Abilities of a policy beyond `policies.base.Policy`; `OptionalMethods` documents the methods.

    value: False if `value` is a constant; algorithms that use a value then refuse the policy. critic: a submodule of
    that name is used only by the value, for `training.optimizer.value_lr`. values_late: `act` returns zeros as values;
    the trainer computes them before an update, by late_values if that is True. publishes_part, shares_reference,
    precomputes, counts_tokens, loads_in_parts, names_blocks, keeps_prefix: its optional methods. streams: it has the
    methods of `policies.engine.Streams`. acts_from_precomputed: `act` too finds `precompute`'s arrays in obs, so a
    generator can lend them to the trainer. beside_precomputed: the observations that `evaluate` and `value` read beside
    these arrays, so that the trainer moves no other; None: any. asks_server: its engine is on a server, which is
    checked before a run. dtype: compute dtype of its linear layers, convolutions and embeddings, which sharded ranks
    gather.
    """

    value: bool = True
    critic: bool = False
    values_late: bool = False
    late_values: bool = False
    publishes_part: bool = False
    shares_reference: bool = False
    precomputes: bool = False
    acts_from_precomputed: bool = False
    beside_precomputed: tuple[str, ...] | None = None
    keeps_prefix: bool = False
    counts_tokens: bool = False
    loads_in_parts: bool = False
    names_blocks: bool = False
    streams: bool = False
    asks_server: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Restrictions by the engine of a policy's settings.

    Texts name the restricting setting and are empty without a restriction. streams_only: it serves streams, not passes.
    single: the run has one generator and one version of the weights. keeps_device: a generator cannot release its
    device. fixed_weights: it cannot receive new weights. cache: purpose in `PolicyForm.engine` of the memory that
    `policy.engine.cache_gib` sets. fresh_cache: a token's log-prob does not depend on older weights than those that
    sampled it.
    """

    streams_only: str = ""
    single: str = ""
    keeps_device: str = ""
    fixed_weights: str = ""
    cache: str = ""
    fresh_cache: bool = False


@dataclass(frozen=True, slots=True)
class SettingsTraits:
    """Declarations of a policy's settings beyond `form` and `build`, known before anything is built.

    preload: slow modules that its processes import in any case. sampling: settings by which tokens are drawn. outlines,
    builds_in_parts, has_miniature: methods of `policies.base.OptionalSettings`. adapts: it has the settings `train`,
    `lora` and `gradient_checkpointing`. folders: `module:attribute` of the `policies.base.FolderFormat` of its released
    folders. policy: traits of its policy, None if they are known only after building.
    """

    preload: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    outlines: bool = False
    builds_in_parts: bool = False
    has_miniature: bool = False
    adapts: bool = False
    folders: str = ""
    engine: EngineTraits = EngineTraits()
    policy: PolicyTraits | None = None


#: Methods that a trait requires of the policy.
POLICY_METHODS: Mapping[str, tuple[str, ...]] = {
    "late_values": ("late_values",),
    "publishes_part": ("published",),
    "shares_reference": ("reference_state", "as_reference"),
    "precomputes": ("precompute",),
    "keeps_prefix": ("prefix_arrays",),
    "counts_tokens": ("row_tokens", "evaluate_longest", "act_longest"),
    "loads_in_parts": ("load_part",),
    "names_blocks": ("blocks",),
    "streams": ("make_engine", "prompt_of", "act_of"),
    "asks_server": ("ask_server",),
}


def policy_traits(policy: object) -> PolicyTraits:
    """The declared traits of a policy, else traits inferred from its methods and its attributes has_value, values_late
    and critic."""
    declared = getattr(policy, "traits", None)
    if isinstance(declared, PolicyTraits):
        return declared
    found: dict[str, Any] = {name: has_methods(policy, methods) for name, methods in POLICY_METHODS.items()}
    traits = PolicyTraits(
        value=bool(getattr(policy, "has_value", True)),
        critic=hasattr(getattr(policy, "critic", None), "parameters"),
        values_late=bool(getattr(policy, "values_late", False)),
    )
    return replace(traits, **found)


def settings_traits(settings: object) -> SettingsTraits:
    """The declared traits of a policy's settings, else traits inferred from their methods and their attribute
    preload."""
    declared = getattr(settings, "traits", None)
    if isinstance(declared, SettingsTraits):
        return declared
    return SettingsTraits(
        preload=tuple(getattr(settings, "preload", ())),
        outlines=has_methods(settings, ("outline",)),
        builds_in_parts=has_methods(settings, ("build_in_parts",)),
    )


def released_folder(settings: object) -> str:
    """Released folder from which a policy's settings begin, their `checkpoint`; "" for none."""
    return str(getattr(settings, "checkpoint", ""))


def has_methods(owner: object, names: tuple[str, ...]) -> bool:
    return all(callable(getattr(owner, name, None)) for name in names)


def missing_methods(policy: object, traits: PolicyTraits) -> list[str]:
    """Methods that the traits declare and the policy lacks."""
    return [
        name
        for trait, methods in POLICY_METHODS.items()
        if getattr(traits, trait)
        for name in methods
        if not has_methods(policy, (name,))
    ]


def plain_traits(traits: PolicyTraits | SettingsTraits | EngineTraits) -> dict[str, Any]:
    """The traits that differ from their defaults, as plain data."""
    default = type(traits)()
    found: dict[str, Any] = {}
    for one in fields(traits):
        value = getattr(traits, one.name)
        if value != getattr(default, one.name):
            found[one.name] = plain_traits(value) if isinstance(value, PolicyTraits | EngineTraits) else value
    return found
