"""Runs an environment of verifiers (v1) with the policy as its agent, instead of a model server.

In verifiers, `Env.run(task, agents)` plays an episode: it opens an interaction with its agent and requests turns.
`Talk` runs that coroutine until it requests a message and resumes it with the policy's, so the library's own code
determines the dialogue and the end of the episode, and its rewards score the trace.

Tools (`vf.Toolset`) run in this process, with the schemas that they declare. The model calls one by

    <tool_call>{"name": "calc_add", "arguments": {"a": 1, "b": 2}}</tool_call>

and the result is the reply, between <tool_response> and </tool_response>; a message without a call ends the turn.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from polyrhythm.plugins.language.sandbox.tool import Shared
from polyrhythm.plugins.language.text.base import enclosed

log = logging.getLogger(__name__)

#: Around a call in a message.
_MARKS = "<tool_call>", "</tool_call>"


class PolicyAgent:
    """Agent of an environment whose messages come from the policy. trace: of its single interaction, once started;
    shared: tools of all episodes; a task's own are created anew for every episode."""

    def __init__(self, talk: Talk, shared: SharedTools) -> None:
        self.trace: Any = None
        self._talk, self._shared = talk, shared

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        """An interaction turn by turn; at its end the task's own rewards are recorded."""
        if self.trace is not None:
            raise RuntimeError("the environment opened a second interaction in one episode")
        async with AsyncExitStack() as stack:
            tools = Tools(await self._shared.open_once())
            await tools.open(toolsets_of(task), stack, task)
            found = _Interaction(self._talk, task, tools)
            self.trace = found.trace
            yield found
            found.trace.is_completed = found.trace.ok = True
            await task.score(found.trace)


class _Interaction:
    """Replacement for `verifiers.v1.agent.Interaction`."""

    def __init__(self, talk: Talk, task: Any, tools: Tools) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.trace import TraceTask
        from verifiers.v1.types import SystemMessage, UserMessage

        self._talk, self._tools, self._stops = talk, tools, task.hooks("stop")
        self._over = False
        self.trace: Any = vf.Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        system, prompt = task.data.system_prompt, task.data.prompt_text
        self._say = "".join(f"{part}\n" for part in (system, tools.described, prompt) if part)
        for made, text in ((SystemMessage, system), (UserMessage, prompt)):
            if text:
                self._add(made(content=text))

    async def turn(self, message: Any = None) -> Any:
        """Send a message and return the segment of the policy's answer, including tool calls, up to a message without a
        call; after the end one segment that says so. RuntimeError: the environment continues after that."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage, UserMessage, content_text

        if self._over:
            raise RuntimeError("the exchange is over, as a terminated segment has said; read interaction.trace")
        if self.trace.stop_condition is not None:
            self._over = True
            return Segment(messages=[], terminated=True)
        if message is not None:
            parts = [message] if isinstance(message, str) else message
            typed = (parse_message(part) if isinstance(part, dict) else part for part in parts)
            texts = [part if isinstance(part, str) else content_text(part.content) for part in typed]
            self._say += "".join(f"{text}\n" for text in texts)
            self._add(UserMessage(content="\n".join(texts)))
        first = len(self.trace.nodes)
        while True:
            said, self._say = self._say, ""
            answer = await self._talk.ask(said)
            call = next(enclosed(answer, *_MARKS), None) if self._tools else None
            if call is None:
                self._add(AssistantMessage(content=answer), sampled=True)
                await self._stop()
                break
            name, arguments = read_call(call)
            number = str(len(self.trace.nodes))
            asked = ToolCall(id=number, name=name, arguments=json.dumps(arguments))
            self._add(AssistantMessage(content=answer, tool_calls=[asked]), sampled=True)
            if await self._stop():
                break
            result = await self._tools.call(name, arguments)
            self._add(ToolMessage(tool_call_id=number, name=name, content=result))
            self._say = f"<tool_response>\n{result}\n</tool_response>\n"
        return Segment(messages=[node.message for node in self.trace.nodes[first:]])

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        from verifiers.v1.graph import MessageNode

        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(MessageNode(message=message, parent=parent, sampled=sampled))

    async def _stop(self) -> bool:
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        for rule in self._stops:
            if await call_hook(rule, {vf.Trace: self.trace}):
                self.trace.stop(rule.__name__)
                return True
        return False


def read_call(call: str) -> tuple[str, Any]:
    """Name and arguments of a call; "" for an invalid one, such as with half a surrogate pair, as pydantic wants."""
    try:
        found = json.loads(call)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        found = None
    return (str(found.get("name", "")), found.get("arguments", {})) if isinstance(found, dict) else ("", {})


def toolsets_of(owner: Any) -> Sequence[Any]:
    """New tool servers of a task or taskset."""
    found: Sequence[Any] = type(owner).toolsets(owner.config)
    return found


def lacking(task: Any, toolsets: Sequence[Any]) -> str:
    """A requirement of the task that is not supported here, "" if none."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary

    if task.NEEDS_CONTAINER:
        return "a container"
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            return f"a runtime for its {hook}"
    rewards = {reward.__name__: reward for reward in task.hooks("reward")}
    for name, reward in (rewards | {judge.reward_name: judge.score for judge in task.plugged_judges()}).items():
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"a runtime for the reward {name}"
    for rule in task.hooks("stop"):
        if hook_boundary(rule, allow_trace=True) is not vf.Trace:
            return f"the requests of a model server for its rule {rule.__name__}"
    return next(filter(None, map(_server_of, toolsets)), "")


def _server_of(toolset: Any) -> str:
    """A tool server that the toolset requires, "" if none."""
    from verifiers.v1.state import State, state_cls

    if state_cls(type(toolset)) is not State:
        return f"a tool server that shares its state with the task ({type(toolset).__name__})"
    if url := getattr(toolset.config, "url", None):
        return f"a tool server at {url} ({type(toolset).__name__})"
    where = toolset.config.runtime.type
    if where != "subprocess":
        return f"a tool server in a runtime of type {where} ({type(toolset).__name__}), and tools run in this process"
    return ""


_HOW = (
    'Tools, one a line:\n{tools}\nCall one by <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>; its result '
    "is shown. A message without a call is your answer.\n"
)


class Tools:
    """Toolsets in this process, including those of `shared`."""

    def __init__(self, shared: Tools | None = None) -> None:
        self._servers: dict[str, tuple[Any, str]] = {} if shared is None else dict(shared._servers)
        self._listed: list[str] = [] if shared is None else list(shared._listed)

    def __bool__(self) -> bool:
        return bool(self._servers)

    @property
    def described(self) -> str:
        """The tools as text for a prompt."""
        return _HOW.format(tools="\n".join(self._listed)) if self._listed else ""

    async def open(self, toolsets: Sequence[Any], stack: AsyncExitStack, task: Any = None) -> None:
        """Set up toolsets, for a task if given. stack: closes their resources."""
        if not toolsets:
            return
        from mcp.server.mcpserver import MCPServer

        for toolset in toolsets:
            await stack.enter_async_context(toolset._exit_stack)
            await toolset.setup()
            if task is not None:
                await toolset.setup_task(task.data)
            server: Any = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for tool in await server.list_tools():
                name = prefix + tool.name
                self._servers[name] = (server, tool.name)
                described = {"name": name, "description": tool.description, "parameters": tool.input_schema}
                self._listed.append(json.dumps(described))

    async def call(self, name: str, arguments: Any) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        if name not in self._servers:
            return f"error: no tool {name!r}; there are {', '.join(self._servers)}"
        server, own = self._servers[name]
        try:
            found = await server.call_tool(own, arguments if isinstance(arguments, dict) else {})
        except ToolError as error:
            return f"error: {error}"
        return "\n".join(part.text for part in found.content if hasattr(part, "text"))


class SharedTools:
    """Toolsets shared by all episodes of this process, as in verifiers without a task. make: creates them.

    The first episode that needs them sets them up, in a separate asyncio task, since resources must be closed by the
    task that opened them.
    """

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        self._make = make
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Tools]
        self._over: asyncio.Event

    async def open_once(self) -> Tools:
        """The tools. Raises the exception of their setup; the next episode then tries again."""
        if self._serving is None:
            self._ready, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._serving = asyncio.create_task(self._serve(self._ready, self._over))
        ready = self._ready
        try:
            return await asyncio.shield(ready)
        except Exception:
            if self._ready is ready:
                self._serving = None
            raise

    async def _serve(self, ready: asyncio.Future[Tools], over: asyncio.Event) -> None:
        """Waits for: the end of the last episode. Unblocked by: `end`. Produces: the tools, while it waits."""
        try:
            async with AsyncExitStack() as stack:
                tools = Tools()
                await tools.open(self._make(), stack)
                ready.set_result(tools)
                await over.wait()
        except Exception as error:
            if ready.done():
                log.warning("the shared tools could not be closed", exc_info=True)
            else:
                ready.set_exception(error)
        finally:
            if not ready.done():
                ready.set_exception(RuntimeError("the setup of the shared tools was cancelled"))

    async def end(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            self._over.set()
            await asyncio.wait({serving})


_Found = TypeVar("_Found")
_starting = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


class Talk:
    """Runs one coroutine at a time, which requests messages, in this process's event loop.

    One thread runs all of them, whatever threads call this, as in verifiers: episodes share objects of the taskset and
    the random generators that it seeds.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[str] | None = None
        self._answer: asyncio.Future[str] | None = None

    def begin(self, run: Coroutine[Any, Any, None]) -> str | None:
        """Start a coroutine, ending one that runs; return its text before it requests a message, None at its end."""
        self.drop()

        async def start() -> str | None:
            self._running = asyncio.create_task(run)
            return await self._until_asked(self._running)

        return run_in_loop(start())

    def answer(self, message: str) -> str | None:
        """Pass it a message; return its next text, None if it has ended."""

        async def go_on() -> str | None:
            assert self._running is not None
            assert self._answer is not None
            self._answer.set_result(message)
            return await self._until_asked(self._running)

        return run_in_loop(go_on())

    async def ask(self, said: str) -> str:
        """Called by the coroutine: emit a text and wait for the next message."""
        self._answer = asyncio.get_running_loop().create_future()
        assert self._asked is not None
        self._asked.set_result(said)
        return await self._answer

    async def _until_asked(self, running: asyncio.Task[None]) -> str | None:
        asked = self._asked = asyncio.get_running_loop().create_future()
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return str(asked.result())
        self._running = None
        return running.result()

    def drop(self) -> None:
        """End the coroutine, if one runs; its exceptions are dropped."""
        running, self._running = self._running, None

        async def end() -> None:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        if running is not None:
            run_in_loop(end())


def run_in_loop(call: Coroutine[Any, Any, _Found]) -> _Found:
    """Run a coroutine in the event loop of this process, in a daemon thread, and return its result. Loops are keyed by
    process because threads do not survive a fork."""
    process = os.getpid()
    with _starting:
        if process not in _loops:
            loop = _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(call, _loops[process]).result()


_SHARED = Shared[SharedTools](lambda tools: run_in_loop(tools.end()))


def shared_tools(name: str, options: str, taskset: Any) -> tuple[SharedTools, Callable[[], None]]:
    """The tools that conversations with this taskset and options share in this process, and what ends their use."""
    return _SHARED.open((os.getpid(), name, options), lambda: SharedTools(partial(toolsets_of, taskset)))
