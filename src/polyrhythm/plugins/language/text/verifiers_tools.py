"""Tools of verifiers (`vf.Toolset`), called in this process by the schemas that they declare."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

log = logging.getLogger(__name__)

_HOW = (
    'Tools, one a line:\n{tools}\nCall one by <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>; its result '
    "is shown. A message without a call is your answer.\n"
)


class Tools:
    """Toolsets in this process, those of `shared` among them."""

    def __init__(self, shared: Tools | None = None) -> None:
        self._servers: dict[str, tuple[Any, str]] = dict(shared._servers) if shared is not None else {}
        self._listed: list[str] = list(shared._listed) if shared is not None else []

    def __bool__(self) -> bool:
        return bool(self._servers)

    @property
    def described(self) -> str:
        """What a prompt says of them."""
        return _HOW.format(tools="\n".join(self._listed)) if self._listed else ""

    async def open(self, toolsets: Sequence[Any], stack: AsyncExitStack, task: Any = None) -> None:
        """Set them up, for a task if there is one. stack: closes what they open."""
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
                self._listed.append(
                    json.dumps({"name": name, "description": tool.description, "parameters": tool.input_schema})
                )

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


class SharedTools:
    """Toolsets that all episodes of this process share, as in verifiers without a task: set up with the first episode
    that asks, in a task of their own, since what opens them has to close them. make: makes them."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        self._make = make
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Tools] | None = None
        self._over: asyncio.Event | None = None

    async def open_once(self) -> Tools:
        """The tools. What their setup raised is raised; then the next episode sets them up anew."""
        if self._serving is None or self._ready is None:
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
        """Waits for: the end of the last episode. Unblocked by: `end`. Produces: the tools."""
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
        """Close them, if they were opened."""
        serving, self._serving = self._serving, None
        if serving is not None and self._over is not None:
            self._over.set()
            await asyncio.wait({serving})


def warn_of_tasks(what: str, toolsets: Sequence[Any]) -> None:
    """Say which shared toolsets wait for tasks. what: the taskset, as a setting."""
    from verifiers.v1.mcp.server import ServerBase

    for toolset in toolsets:
        if type(toolset).setup_task is not ServerBase.setup_task:
            log.warning(
                "%s: %s.setup_task is not called, as in verifiers: the tools of a taskset are set up once for all of "
                "its tasks; do it in setup, or make them the tools of the tasks",
                *(what, type(toolset).__name__),
            )
