"""Declares what a policy, its settings and its engine can do beyond what every one must.

An object of ours has an attribute `traits`. Of a class that declares none, `policy_traits` and `settings_traits` read
the same from its methods and attributes; no other code looks at an object to learn what it can do. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

#: Settings by which the policies that draw tokens draw them (`SettingsTraits.sampling`).
SAMPLING = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """What a policy has beyond the methods of `policies.base.Policy`; `OptionalMethods` documents the methods.

    value: False where `value` is a constant, which algorithms that use a value refuse. critic: a submodule of that name
    that only the value uses, for `training.optimizer.value_lr`. values_late: `act` gives zeros for the value; the
    trainer computes it before an update, by late_values where that is True. publishes_part, shares_reference,
    precomputes, counts_tokens, loads_in_parts, names_blocks, keeps_prefix: its optional methods. streams: the methods
    of `policies.engine.Streams`. asks_server: its engine is at a server, which a run asks before it begins. dtype: what
    its linear layers, convolutions and embeddings compute in, which ranks that divide the weights gather.
    """

    value: bool = True
    critic: bool = False
    values_late: bool = False
    late_values: bool = False
    publishes_part: bool = False
    shares_reference: bool = False
    precomputes: bool = False
    keeps_prefix: bool = False
    counts_tokens: bool = False
    loads_in_parts: bool = False
    names_blocks: bool = False
    streams: bool = False
    asks_server: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the engine of a policy's settings restricts.

    Texts name the setting that restricts, and are empty where nothing does. streams_only: it answers streams, not
    passes. single: the run has one generator and one version of the weights. keeps_device: a generator cannot give its
    device up. fixed_weights: it cannot get new weights. cache: the purpose, among `PolicyForm.engine`, of the memory
    that `policy.engine.cache_gib` sets. fresh_cache: a token's log-prob depends on no weights older than those that
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
    """What a policy's settings declare beyond `form` and `build`, known before anything is built.

    preload: modules that its processes import anyway and that take long. sampling: the settings by which tokens are
    drawn. outlines, builds_in_parts, has_miniature: the methods of `policies.base.OptionalSettings`. adapts: has the
    settings `train`, `lora` and `gradient_checkpointing`. folders: `module:attribute` of the
    `policies.base.FolderFormat` of its released folders. policy: its policy's traits, None where they are known only
    once it is built.
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


#: Trait → the methods that a policy with it has.
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
    """The traits that a policy declares, else those of its methods and of its attributes has_value, values_late and
    critic."""
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
    """The traits that a policy's settings declare, else those of their methods and of their attribute preload."""
    declared = getattr(settings, "traits", None)
    if isinstance(declared, SettingsTraits):
        return declared
    return SettingsTraits(
        preload=tuple(getattr(settings, "preload", ())),
        outlines=has_methods(settings, ("outline",)),
        builds_in_parts=has_methods(settings, ("build_in_parts",)),
    )


def has_methods(owner: object, names: tuple[str, ...]) -> bool:
    """Whether the object has all these methods."""
    return all(callable(getattr(owner, name, None)) for name in names)


def missing_methods(policy: object, traits: PolicyTraits) -> list[str]:
    """Methods that the policy lacks although its traits declare them."""
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
