"""Turns pydantic's errors into sentences: dotted path, value, problem, fix, nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from polyrhythm.config.base import InvalidSetting, models_in, quoted
from polyrhythm.config.registry import NestedRefusal
from polyrhythm.errors import nearest

Location = Sequence[int | str]

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
#: Path → names of the same setting in other systems.
OTHER_NAMES = {
    "out_dir": ("output", "output_dir", "out", "save_dir", "log_dir", "logdir", "work_dir", "run_dir"),
    "rollout.rows": ("num_envs", "n_envs", "envs"),
    "rollout.simulators": ("num_workers", "workers", "num_env_runners"),
    "training.versions": ("iterations", "num_iterations", "total_iterations", "num_updates"),
    "training.mini_batch_samples": ("batch_size", "train_batch_size", "ppo_mini_batch_size"),
    "training.epochs": ("n_epochs", "num_epochs", "ppo_epochs", "update_epoch", "update_epochs"),
    "training.micro_batch_steps": ("micro_batch_size", "ppo_micro_batch_size_per_gpu"),
    "training.optimizer.lr": ("learning_rate",),
    "training.optimizer.grad_clip": ("max_grad_norm", "clip_grad"),
    "training.max_kl": ("target_kl",),
    "groups.size": ("group_size", "num_generations", "rollout_n"),
    "freshness.max_lag": ("staleness_threshold", "max_staleness", "max_head_offpolicyness", "staleness"),
    "algorithm.gae_lambda": ("lam", "lambda"),
    "algorithm.entropy_coef": ("ent_coef", "entropy_bonus", "entropy_coeff"),
    "algorithm.value.coef": ("vf_coef", "value_coef", "critic_coef"),
    "algorithm.loss.clip_low": ("clip_range", "clip_ratio", "clip_ratio_low", "cliprange", "clip_coef"),
    "algorithm.loss.clip_high": ("clip_ratio_high",),
    "algorithm.advantage": ("adv_type", "adv_estimator"),
    "evaluation.every": ("eval_freq", "eval_interval", "val_check_interval", "test_freq"),
    "evaluation.episodes": ("eval_episodes", "n_eval_episodes", "num_eval_episodes"),
    "checkpoint.every_versions": ("save_freq", "save_interval", "save_steps"),
    "init_from": ("load_from", "pretrained", "ckpt_path"),
}
#: Path → what a user of the command line may mean instead.
_OPTIONS = {"out_dir": "--out FOLDER (of this run)"}
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a section (key: value lines)",
    "model_attributes_type": "a section (key: value lines)",
    "dict_type": "a section (key: value lines)",
}


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One sentence per problem; `prefix` precedes every path."""
    sentences: list[str] = []
    for detail in error.errors(include_url=False):
        sentences += _explain_one(detail, model, prefix)
    return sentences


def _explain_one(detail: ErrorDetails, model: type[BaseModel], prefix: str) -> list[str]:
    parts, holder = _walk(model, detail["loc"])
    path = ".".join([prefix] * bool(prefix) + parts)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, InvalidSetting):
        return [_sentence(".".join(filter(None, (path, cause.path))), cause.value, cause.why)]
    if isinstance(cause, NestedRefusal):
        return explain(cause.error, cause.model, path)
    if detail["type"] == "missing":
        return [f"{path} is missing; add it{_purpose(holder, parts)}"]
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        why = f"no such key; {_instead(path, parts, holder, model, prefix)}"
        return [f"{path}: {why}" if isinstance(value, dict) else _sentence(path, value, why)]
    if detail["type"] == "union_tag_invalid":
        path, value = f"{path}.type", detail["ctx"]["tag"]
    return [_sentence(path, value, _why(detail))]


def _instead(path: str, parts: list[str], holder: type[BaseModel] | None, model: type[BaseModel], prefix: str) -> str:
    section, _, key = path.rpartition(".")
    keys = list(holder.model_fields) if holder else []
    valid = f"{f'the keys of {section}' if section else 'the sections'} are {', '.join(keys)}"
    types = _types_with(key, parts[:-1], model)
    if types:
        return f"{valid}; {key} is one of {section}.type {' or '.join(types)}"
    elsewhere = [f"{prefix}.{found}" if prefix else found for found in paths_to(key, model)]
    if not prefix:
        known = [ours for ours, names in OTHER_NAMES.items() if key in names]
        elsewhere = [_OPTIONS[ours] for ours in known if ours in _OPTIONS] + known or elsewhere
    if not elsewhere and section and holder:
        nested = {found.rpartition(".")[2]: f"{section}.{found}" for found in paths_to(None, holder) if "." in found}
        close = difflib.get_close_matches(key, {**nested, **dict.fromkeys(keys)}, n=1)
        elsewhere = [nested[name] for name in close if name not in keys]
    return nearest(key, keys, elsewhere=elsewhere) + valid


def _types_with(key: str, parts: Sequence[str], model: type[BaseModel]) -> list[str]:
    models = [model]
    for part in parts:
        fields = [candidate.model_fields[part] for candidate in models if part in candidate.model_fields]
        models = [found for field in fields for found in models_in(field.annotation)]
    having = [found.model_fields["type"] for found in models if {key, "type"} <= found.model_fields.keys()]
    return [str(tag) for field in having for tag in get_args(field.annotation)]


def _sentence(path: str, value: object, why: str) -> str:
    shown = quoted(value)
    return f"{path or 'config'} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {why}"


def _why(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        key, relation = _BOUNDS[kind]
        return f"it must be {relation} {context[key]}"
    if kind in _KINDS:
        return f"it must be {_KINDS[kind]}"
    if kind == "literal_error":
        expected = context["expected"]
        return f"{_nearest_quoted(detail['input'], expected)}it must be {expected}"
    if kind == "union_tag_invalid":
        tags = context["expected_tags"]
        return f"{_nearest_quoted(context['tag'], tags)}it must be {tags}"
    if kind == "union_tag_not_found":
        return "it needs a type"
    if kind == "string_pattern_mismatch":
        return f"it must match {context['pattern']}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", detail["msg"]))
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _nearest_quoted(word: object, listed: str) -> str:
    return nearest(word, [entry.strip(" '\"") for entry in listed.replace(" or ", ",").split(",")])


def _purpose(holder: type[BaseModel] | None, parts: list[str]) -> str:
    field = holder.model_fields.get(parts[-1]) if holder and parts else None
    example = f", such as {parts[-1]}: {field.examples[0]}" if field and field.examples else ""
    return f"{example} ({field.description.rstrip('.')})" if field and field.description else example


def _walk(model: type[BaseModel], loc: Location) -> tuple[list[str], type[BaseModel] | None]:
    """Dotted parts of a location without the tags of unions, and the model that has its last key."""
    parts: list[str] = []
    candidates: list[type[BaseModel]] = [model]
    holder: type[BaseModel] | None = model
    tags: set[str] = set()
    for step in loc:
        tagged = [found for found in candidates if _has_tag(found, step)] if len(candidates) > 1 else []
        tagged = tagged or [found for found in candidates if found.__name__ == step]
        if tagged:
            candidates = tagged
            continue
        if step in tags:
            continue
        if isinstance(step, int) and candidates:  # a place in a list of sections
            parts.append(str(step))
            continue
        holder = candidates[0] if candidates else None
        parts.append(str(step))
        field = holder.model_fields.get(str(step)) if holder else None
        candidates = models_in(field.annotation) if field else []
        tags = _tags_in(field.annotation) if field else set()
    return parts, holder


def _tags_in(annotation: Any) -> set[str]:
    own = {part.tag for part in getattr(annotation, "__metadata__", ()) if isinstance(part, Tag)}
    return own.union(*map(_tags_in, get_args(annotation)))


def paths_to(key: str | None, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of the model's keys with this name (None: of all keys), except those within lists."""
    found = [prefix + name for name in model.model_fields if key in (None, name)]
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) in (tuple, list):
            continue
        for section in models_in(field.annotation):
            found += paths_to(key, section, f"{prefix}{name}.")
    return list(dict.fromkeys(found))


def _has_tag(model: type[BaseModel], tag: object) -> bool:
    """Whether a union's tag is the model's type: a literal of that field, or module:function for a custom function."""
    field = model.model_fields.get("type")
    return field is not None and (tag in get_args(field.annotation) or (field.annotation is str and ":" in str(tag)))
