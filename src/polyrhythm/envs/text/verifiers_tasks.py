"""Tasks of verifiers (its v1 interface) that are answered in one message, scored by their own reward functions.

verifiers has a harness run the episode against a model server; here the environment is asked, so of a taskset the data
and the rewards are used. Tasks that need a container, tool servers, or a runtime for their rewards are refused.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from polyrhythm.envs.text.base import Count, Reply, TextSettings, draw_apart
from polyrhythm.errors import ConfigError, MissingError, pip_install


class VerifiersSettings(TextSettings):
    """A taskset of verifiers: the prompt is a task's, after its system prompt; the reward the sum of its own."""

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


class _Drawn(NamedTuple):
    prompt: str
    task: Any


class VerifiersTask:
    """One task."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self._tasks = _tasks(settings.taskset, json.dumps(settings.options), settings.most)
        self._success = settings.success
        self._task: Any = None

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        found: _Drawn = draw_apart(seed, self._draw)
        self._task = found.task
        return found.prompt

    def _draw(self, random: Random) -> _Drawn:
        task = random.choice(self._tasks)
        parts = [task.data.system_prompt or "", task.data.prompt_text]
        return _Drawn("".join(f"{part}\n" for part in parts if part), task)

    def reply(self, message: str) -> Reply:
        reward = asyncio.run(_score(self._task, message))
        return Reply(reward=reward, success=reward >= self._success)


async def _score(task: Any, message: str) -> float:
    """The reward of an answer, in a trace as verifiers would have recorded it."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    trace: Any = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            MessageNode(message=UserMessage(content=task.data.prompt_text)),
            MessageNode(message=AssistantMessage(content=message), parent=0, sampled=True),
        ],
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    return float(trace.reward)


@lru_cache(maxsize=8)
def _tasks(name: str, options: str, most: int) -> list[Any]:
    """Tasks of a taskset, read once per process. MissingError: verifiers or the taskset is not installed; ConfigError:
    there are none, or they need more than one message."""
    what = f"env.taskset = {name}"
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        install = pip_install("'polyrhythm[verifiers]'")
        raise MissingError(f"env.type = verifiers: {error}; run: {install}") from error
    try:
        taskset = load_taskset(taskset_config_type(name).model_validate({**json.loads(options), "id": name}))
    except ImportError as error:
        raise MissingError(f"{what}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}; correct env.taskset or env.options") from error
    found = list(islice(taskset, most))
    if not found:
        raise ConfigError(f"{what}: it has no tasks; correct env.options")
    if lacking := _lacking(found[0]):
        raise ConfigError(f"{what}: its tasks need {lacking}; only tasks of one message, scored without, can be used")
    return found


def _lacking(task: Any) -> str:
    """What a task needs that is not there, "" if nothing."""
    if task.NEEDS_CONTAINER:
        return "a container"
    if type(task).toolsets(task.config):
        return "tool servers"
    if not task.data.prompt_text:
        return "somebody who opens the conversation"
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"a runtime for the reward {reward.__name__}"
    return ""
