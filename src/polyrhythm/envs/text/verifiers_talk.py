"""An environment of verifiers (v1) that asks for its model's messages here, instead of at a model server.

verifiers has `Env.run(task, agents)` play an episode: it opens an interaction with its agent and asks for a turn at a
time. Here the agent is the policy. `Talk` runs that coroutine until it asks, and goes on with the answer, so the
library's own code decides what is said and when the episode ends, and its rewards score the trace.

Tools (`vf.Toolset`) are called in this process, by the schemas that they declare. The model calls one by

    <tool_call>{"name": "calc_add", "arguments": {"a": 1, "b": 2}}</tool_call>

and the result is the reply, between <tool_response> and </tool_response>; a message without a call ends the turn.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_HOW = (
    'Tools, one a line:\n{tools}\nCall one by <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>; its result '
    "is shown. A message without a call is your answer.\n"
)


class Talk:
    """Runs one coroutine at a time, which asks for messages, in an event loop of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[str] | None = None
        self._answer: asyncio.Future[str] | None = None

    def begin(self, run: Coroutine[Any, Any, None]) -> str | None:
        """What the coroutine says before it asks for a message; None: it has ended. One that runs is ended first."""
        self.drop()
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(run)
        return self._go_on(self._loop, self._running)

    def answer(self, message: str) -> str | None:
        """The same, after it got this message."""
        assert self._loop is not None
        assert self._running is not None
        assert self._answer is not None
        self._answer.set_result(message)
        return self._go_on(self._loop, self._running)

    async def ask(self, said: str) -> str:
        """Called by the coroutine: the message that follows what it says."""
        self._answer = asyncio.get_running_loop().create_future()
        assert self._asked is not None
        self._asked.set_result(said)
        return await self._answer

    def drop(self) -> None:
        """End the coroutine, if one runs."""
        loop, running, self._loop, self._running = self._loop, self._running, None, None
        if loop is None or running is None:
            return
        try:
            if not running.done():
                running.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    loop.run_until_complete(running)
        finally:
            loop.close()

    def _go_on(self, loop: asyncio.AbstractEventLoop, running: asyncio.Task[None]) -> str | None:
        asked: asyncio.Future[str] = loop.create_future()
        self._asked = asked
        both: set[asyncio.Future[Any]] = {running, asked}
        loop.run_until_complete(asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))
        if asked.done():
            return asked.result()
        self.drop()
        running.result()
        return None


class PolicyAgent:
    """The agent of an environment, whose messages are the policy's. trace: of its one interaction, once it began.
    toolsets: makes the tool servers of a task, new ones for every episode."""

    def __init__(self, talk: Talk, toolsets: Callable[[Any], Sequence[Any]]) -> None:
        self.trace: Any = None
        self._talk, self._toolsets = talk, toolsets

    async def run(self, task: Any) -> Any:
        """The whole task in one turn."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        """An exchange, turn by turn; at its end the task's own rewards are given."""
        if self.trace is not None:
            raise RuntimeError("the environment opened a second interaction in one episode")
        tools = _Tools()
        await tools.open(self._toolsets(task), task)
        found = _Interaction(self._talk, task, tools)
        self.trace = found.trace
        yield found
        found.trace.is_completed = found.trace.ok = True
        await task.score(found.trace)


class _Interaction:
    """What `verifiers.v1.agent.Interaction` is to an environment."""

    def __init__(self, talk: Talk, task: Any, tools: _Tools) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.trace import TraceTask
        from verifiers.v1.types import SystemMessage, UserMessage

        self._talk, self._tools, self._stops = talk, tools, task.hooks("stop")
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
        """Say this; the segment with what the policy says, and tools in between, until a message without a call."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage, UserMessage, content_text

        if self.trace.stop_condition is not None:
            return Segment(messages=[], terminated=True)
        if message is not None:
            texts = [message] if isinstance(message, str) else [content_text(one.content) for one in message]
            self._say += "".join(f"{text}\n" for text in texts)
            self._add(UserMessage(content="\n".join(texts)))
        first = len(self.trace.nodes)
        while True:
            said, self._say = self._say, ""
            answer = await self._talk.ask(said)
            call = _CALL.search(answer) if self._tools else None
            if call is None:
                self._add(AssistantMessage(content=answer), sampled=True)
                await self._stop()
                break
            name, arguments = _read(call[1])
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

        parent = len(self.trace.nodes) - 1
        self.trace.nodes.append(MessageNode(message=message, parent=None if parent < 0 else parent, sampled=sampled))

    async def _stop(self) -> bool:
        """Whether one of the task's own rules ends the exchange."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        for rule in self._stops:
            if await call_hook(rule, {vf.Trace: self.trace}):
                self.trace.stop(rule.__name__)
                return True
        return False


class _Tools:
    """Toolsets in this process. described: what a prompt says of them."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[Any, str]] = {}
        self.described = ""

    def __bool__(self) -> bool:
        return bool(self._servers)

    async def open(self, toolsets: Sequence[Any], task: Any) -> None:
        """Set them up for a task."""
        if not toolsets:
            return
        from mcp.server.mcpserver import MCPServer

        listed = []
        for toolset in toolsets:
            await toolset.setup()
            await toolset.setup_task(task.data)
            server: Any = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for tool in await server.list_tools():
                name = prefix + tool.name
                self._servers[name] = (server, tool.name)
                listed.append(
                    json.dumps({"name": name, "description": tool.description, "parameters": tool.input_schema})
                )
        if listed:
            self.described = _HOW.format(tools="\n".join(listed))

    async def call(self, name: str, arguments: Any) -> str:
        """The result as text, or what was wrong."""
        from mcp.server.mcpserver.exceptions import ToolError

        if name not in self._servers:
            return f"error: no tool {name!r}; there are {', '.join(self._servers)}"
        server, own = self._servers[name]
        try:
            found = await server.call_tool(own, arguments if isinstance(arguments, dict) else {})
        except ToolError as error:
            return f"error: {error}"
        return "\n".join(part.text for part in found.content if hasattr(part, "text"))


def _read(call: str) -> tuple[str, Any]:
    """Name and arguments of a call; "" for what is none."""
    try:
        found = json.loads(call)
    except ValueError:
        return "", {}
    if not isinstance(found, dict):
        return "", {}
    return str(found.get("name", "")), found.get("arguments", {})


def lacking(task: Any, toolsets: Sequence[Any]) -> str:
    """What a task needs that is not there, "" if nothing."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary

    if task.NEEDS_CONTAINER:
        return "a container"
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            return f"a runtime for its {hook}"
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"a runtime for the reward {reward.__name__}"
    for rule in task.hooks("stop"):
        if hook_boundary(rule, allow_trace=True) is not vf.Trace:
            return f"the requests of a model server for its rule {rule.__name__}"
    return next(filter(None, map(_server_of, toolsets)), "")


def _server_of(toolset: Any) -> str:
    """The tool server that a toolset needs, "" if none."""
    from verifiers.v1.state import State, state_cls

    if state_cls(type(toolset)) is not State:
        return f"a tool server that shares its state with the task ({type(toolset).__name__})"
    if url := getattr(toolset.config, "url", None):
        return f"a tool server at {url} ({type(toolset).__name__})"
    return ""
