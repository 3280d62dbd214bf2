"""Records the environment's expert, or a run's policy, into a dataset folder: `polyrhythm demos --out FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.pipeline.sft import refuse_without_expert, validate_imitation
from polyrhythm.pipeline.warm_start.demos import OnProgress
from polyrhythm.pipeline.warm_start.episodes import Actor, expert_of
from polyrhythm.plugins.lerobot.acting import PolicyActor
from polyrhythm.plugins.lerobot.layout import require_pyarrow
from polyrhythm.plugins.lerobot.recording import Source, open_recording, record_dataset, recorded_form
from polyrhythm.policies.base import as_module
from polyrhythm.policies.form import load_published
from polyrhythm.stations.simulator.slot import StepSettings


def record_folder(config: RunConfig, folder: Path, run: Path | None, fps: int, watch: OnProgress) -> dict[str, Any]:
    """Record in the recipe's environment; return the summary. run: folder of the policy, None for the expert.

    Raises ConfigError and RunFolderError before the first episode: what does not fit, and what `open_recording` says.
    """
    require_pyarrow()
    assert config.demonstrations is not None
    if env_settings(config).spec().chunk:
        raise ConfigError(
            f"--out = {folder}: a step of this environment takes a whole message, which no dataset of frames can hold; "
            "leave demos out, a run records such demonstrations itself"
        )
    settings = config.demonstrations
    actor, who = None, "expert"
    if run is not None:
        actor, who = _policy_of(config, run)
        settings = settings.model_copy(update={"noise_std": 0.0})
    else:
        refuse_without_expert(config)
    repeat = config.rollout.action_repeat
    what = recorded_form(config.env.model_dump(mode="json"), settings, repeat, fps) | {"demonstrator": who}
    open_recording(folder, what)
    return _record(config, folder, settings, what, actor, watch)


def _record(
    config: RunConfig,
    folder: Path,
    settings: DemonstrationSettings,
    what: dict[str, Any],
    actor: Actor | None,
    watch: OnProgress,
) -> dict[str, Any]:
    env = env_settings(config).build(config.rollout.rows)
    try:
        source = Source(what, actor or expert_of(env), settings.noise_std, keep_failed=actor is not None)
        return record_dataset(folder, env, source, settings, StepSettings(1, config.rollout.action_repeat), watch)
    finally:
        env.close()


def _policy_of(config: RunConfig, run: Path) -> tuple[Actor, str]:
    """The run's policy in this recipe's environment, acting greedily, and its name in the journal."""
    found, weights, version = load_policy(run)
    policy = validate_imitation(config.model_copy(update={"policy": found.policy})).policy
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"{run}: {error}; this policy belongs to another environment, name another run") from error
    return PolicyActor(policy, greedy=True), f"policy {run.resolve().name} version {version}"
