"""Writes a saved policy as one folder of safetensors: in its released layout, as adapters, or by its own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from polyrhythm.pipeline.persistence.checkpoints import SavedPolicy
    from polyrhythm.plugins.vla.checkpoint import Checkpoint


def export(path: Path, out: Path, base: str | None = None) -> dict[str, Any]:
    """Write the policy that `path` names into the new folder `out`; what was written, by name. base: the released
    folder that it was trained from, in place of the one in its settings. ConfigError: it cannot be written so."""
    from polyrhythm.pipeline.persistence.checkpoints import read_policy
    from polyrhythm.plugins.vla.architectures import ARCHITECTURES

    saved = read_policy(path)
    section: Mapping[str, Any] = saved.config["policy"]
    if section["type"] == "causal_lm" and (base or section["checkpoint"]):
        return _language_model(saved, path, base or section["checkpoint"], out)
    if section["type"] not in ARCHITECTURES:
        if base:
            raise ConfigError(
                f"--base = {base}: policy.type = {section['type']} has no released layout; leave it out (those that "
                f"have one are {', '.join(ARCHITECTURES)})"
            )
        _refuse_adapters(path, saved)
        _write_plain(saved, out)
        return {"exported": "policy", "version": saved.version, "out": str(out)}
    if not (base := base or section.get("checkpoint", "")):
        _write_new(path, out, saved)
        return {"exported": "network", "version": saved.version, "out": str(out)}
    what = _write_trained(saved, section, open_base(base, path, named=base != section.get("checkpoint")), out)
    return {"exported": what, "version": saved.version, "base": str(base), "out": str(out)}


def _language_model(saved: SavedPolicy, path: Path, base: str, out: Path) -> dict[str, Any]:
    """A language model that began with the folder `base`."""
    from polyrhythm.plugins.language.causal_lm.folders import save_trained
    from polyrhythm.plugins.language.causal_lm.settings import CausalLmSettings

    section = CausalLmSettings.model_validate(saved.config["policy"])
    opened = open_base(base, path, named=base != section.checkpoint)
    what = save_trained(saved.weights, section, opened, out)
    return {"exported": what, "version": saved.version, "base": base, "out": str(out)}


def _write_plain(saved: SavedPolicy, out: Path) -> None:
    """A policy of ours: its tensors and its settings."""
    from polyrhythm.files import name_in_errors
    from polyrhythm.pipeline.persistence.checkpoints import EXPORTED_MODEL, EXPORTED_SETTINGS
    from polyrhythm.plugins.vla.saving import new_folder, write_tensors
    from polyrhythm.specs.plain import as_plain

    spec = None if saved.spec is None else as_plain(saved.spec)
    policy, env = saved.config["policy"], saved.config.get("env")
    content = {"policy": policy, "version": saved.version, "env": env, "spec": spec, "config": saved.config}
    with new_folder(out) as unfinished:
        with name_in_errors(unfinished / EXPORTED_SETTINGS):
            (unfinished / EXPORTED_SETTINGS).write_text(json.dumps(content, indent=1), encoding="utf-8")
        # Tensors that share memory, which safetensors does not write, are written each.
        write_tensors({name: tensor.clone() for name, tensor in saved.weights.items()}, unfinished / EXPORTED_MODEL)


def open_base(base: str, of: Path, *, named: bool) -> Checkpoint:
    """The released folder that the run or the adapters `of` were trained on. named: by the command, not by them.
    MissingError: it is no longer where they say; ConfigError: it is none."""
    from polyrhythm.plugins.vla.checkpoint import Checkpoint

    if not named and not Path(base).expanduser().exists():
        raise MissingError(f"{of}: it was trained on {base}, which is not there; name where it is now: --base FOLDER")
    return Checkpoint.open(base)


def _write_trained(saved: SavedPolicy, section: Mapping[str, Any], base: Checkpoint, out: Path) -> str:
    """A policy that began with the released folder `base`, in its layout, or its adapters; which of both."""
    from polyrhythm.plugins.vla.adapters import is_adapter, save_adapters
    from polyrhythm.plugins.vla.architectures import architecture
    from polyrhythm.plugins.vla.saving import save_folder

    base.require(section["type"])
    if any(is_adapter(name) for name in saved.weights):
        lora = section["lora"]
        also, prefix = tuple(lora.get("also", ())), base.prefix
        save_adapters(saved.weights, out, alpha=lora["alpha"], base=base, also=also, prefix=prefix)
        return "adapters"
    save_folder(base, architecture(section["type"]), saved.weights, out)
    return "network"


def _refuse_adapters(path: Path, saved: SavedPolicy) -> None:
    """Raise ConfigError for adapters on a network that no folder holds."""
    from polyrhythm.plugins.vla.adapters import is_adapter

    if any(is_adapter(name) for name in saved.weights):
        raise ConfigError(
            f"{path}: it has adapters on a network from a seed, which is in no folder; export a run with another "
            "policy.train, or begin from a checkpoint"
        )


def _write_new(path: Path, out: Path, saved: SavedPolicy) -> None:
    """The policy of a run that began from a seed: what its file lacks is drawn again."""
    from polyrhythm.config.load import validate
    from polyrhythm.plugins.vla.architectures import architecture
    from polyrhythm.plugins.vla.inputs import VlaInputs
    from polyrhythm.plugins.vla.saving import save_new
    from polyrhythm.plugins.vla.statistics import BOUNDS
    from polyrhythm.plugins.vla.tokenizers import WORDS
    from polyrhythm.policies.base import as_module, as_settings
    from polyrhythm.policies.form import load_published

    _refuse_adapters(path, saved)
    if saved.spec is None:
        raise ConfigError(f"{path}: the file lacks the environment's form; resume the run once, which writes it again")
    config = validate(saved.config, origin=str(saved.file))
    policy = as_module(as_settings(config.policy).build(saved.spec, seed=config.seed, device="cpu", role="train"))
    load_published(policy, saved.weights)
    network = policy.get_submodule("network")
    inputs = policy.get_submodule("inputs")
    assert isinstance(inputs, VlaInputs)
    choices = {"tokenizer": WORDS, "robot": BOUNDS, "cameras": [slot for slot, _ in inputs.plan.cameras]}
    save_new(architecture(saved.config["policy"]["type"]), network.size, policy.state_dict(), out, choices)
