"""Tasks of verifiers (its v1 interface), in one or several turns, with tools, scored by their own rewards.

The taskset's own environment plays the episode through `verifiers_talk` instead of a model server, if its package
defines one with a single agent. Tasks that need a container, stateful tool servers or a runtime are refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.language.text.base import Count, TextSettings, draw_apart, is_held_out
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.plugins.language.text.verifiers_talk import PolicyAgent, Talk, lacking, shared_tools, toolsets_of

log = logging.getLogger(__name__)


class VerifiersSettings(TextSettings):
    """A taskset of verifiers: the prompt is a task's, after its system prompt and what its tools are; the reward of the
    last message is the sum of its own. `max_turns` above 1 for turns or tools."""

    needs: ClassVar = ("verifiers",)
    extra: ClassVar = "verifiers"

    type: Literal["verifiers"] = "verifiers"
    taskset: Annotated[str, Field(min_length=1)]
    """Id of the taskset: an installed package, or a module that can be imported."""
    options: Mapping[str, Any] = {}
    """Settings of the taskset."""
    most: Count = 10_000
    """Tasks that are read of it."""
    success: float = 1.0
    """Least reward of an answer that succeeded."""
    max_prompt_tokens: Count = 1024
    """Most tokens of a prompt."""

    def conversation(self) -> VerifiersTask:
        return VerifiersTask(self)


class VerifiersTask:
    def __init__(self, settings: VerifiersSettings) -> None:
        options = json.dumps(settings.options)
        loaded = self._loaded = _load(settings.taskset, options, settings.most)
        self._success = settings.success
        self._talk = Talk()
        self._shared, self._leave = shared_tools(settings.taskset, options, loaded.environment.taskset)
        self._agent: PolicyAgent | None = None

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        loaded = self._loaded
        drawn = draw_apart(seed, lambda random: random.choice(loaded.tasks), loaded.apart_by)
        agent = self._agent = PolicyAgent(self._talk, self._shared)
        said = self._talk.begin(loaded.environment.run(drawn, SimpleNamespace(**{loaded.agent: agent})))
        if said is None:
            raise ConfigError("env.taskset: its environment ended before it asked for a message; use another")
        return said

    def reply(self, message: str) -> Reply:
        said = self._talk.answer(message)
        if said is not None:
            return Reply(said, done=False)
        assert self._agent is not None
        reward = float(self._agent.trace.reward)
        return Reply(reward=reward, success=reward >= self._success)

    def close(self) -> None:
        self._talk.drop()
        self._leave()


class _Loaded(NamedTuple):
    """A taskset: its tasks, its environment, the name of the environment's agent, and the text of a task that assigns
    it to training or evaluation."""

    tasks: list[Any]
    environment: Any
    agent: str
    apart_by: Callable[[Any], str]


def _prompt(task: Any) -> str:
    parts = [task.data.system_prompt or "", task.data.prompt_text]
    return "".join(f"{part}\n" for part in parts if part)


def _data(task: Any) -> str:
    """The initial data of a game whose prompt is always the same."""
    return str(task.data.model_dump_json(exclude={"idx", "id", "name"}))


def _warn_of_tasks(what: str, toolsets: Sequence[Any]) -> None:
    from verifiers.v1.mcp.server import ServerBase

    for toolset in toolsets:
        if type(toolset).setup_task is not ServerBase.setup_task:
            words = "%s: %s.setup_task is not called, as in verifiers: the tools of a taskset are set up once for all "
            words += "of its tasks; do it in setup, or make them the tools of the tasks"
            log.warning(words, what, type(toolset).__name__)


@lru_cache(maxsize=8)
def _load(name: str, options: str, most: int) -> _Loaded:
    """The taskset, loaded once per process. MissingError: verifiers or the taskset is not installed; ConfigError: it
    has no tasks, or they need unsupported features."""
    what = f"env.taskset = {name}"
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.env import Env
        from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config
    except ImportError as error:
        install = install_command("verifiers")
        raise MissingError(f"env.type = verifiers: {error}; run: {install}") from error
    try:
        import_taskset(name)
        config = resolve_env_config({"taskset": {**json.loads(options), "id": name}})
        environment: Any = load_environment(config)
    except ImportError as error:
        raise MissingError(f"{what}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}; correct env.taskset or env.options") from error
    found = list(islice(environment.taskset, most))
    if not found:
        raise ConfigError(f"{what}: it has no tasks; correct env.options")

    agents = list(agent_config_fields(config))
    own, of_all = type(environment), toolsets_of(environment.taskset)
    needs = lacking(found[0], [*of_all, *toolsets_of(found[0])])
    if len(agents) > 1:
        needs = f"{len(agents)} agents ({', '.join(agents)})"
    elif own.finalize is not Env.finalize or own.start is not Env.start:
        needs = "a server of environments"
    if needs:
        raise ConfigError(f"{what}: its tasks need {needs}; use a taskset that does without")
    _warn_of_tasks(what, of_all)
    sides = {is_held_out(_prompt(task)) for task in found}
    return _Loaded(found, environment, agents[0], _prompt if len(sides) == 2 else _data)
