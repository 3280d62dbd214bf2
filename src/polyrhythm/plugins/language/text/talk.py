"""Runs coroutines that ask for messages: each goes on when it gets one, whatever thread gives it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Found = TypeVar("_Found")


class Talk:
    """Runs one coroutine at a time, which asks for messages, in the event loop of this process: what a taskset shares
    between its episodes, and the generators of random numbers that it seeds, are used by one thread alone, as in
    verifiers, whatever threads call this."""

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[str] | None = None
        self._answer: asyncio.Future[str] | None = None

    def begin(self, run: Coroutine[Any, Any, None]) -> str | None:
        """What the coroutine says before it asks for a message; None: it has ended. One that runs is ended first."""
        self.drop()
        return run_in_loop(self._begin(run))

    def answer(self, message: str) -> str | None:
        """The same, after it got this message."""
        return run_in_loop(self._go_on(message))

    async def ask(self, said: str) -> str:
        """Called by the coroutine: the message that follows what it says."""
        self._answer = asyncio.get_running_loop().create_future()
        assert self._asked is not None
        self._asked.set_result(said)
        return await self._answer

    def drop(self) -> None:
        """End the coroutine, if one runs."""
        running, self._running = self._running, None
        if running is not None:
            run_in_loop(_end(running))

    async def _begin(self, run: Coroutine[Any, Any, None]) -> str | None:
        self._running = asyncio.create_task(run)
        return await self._until_asked(self._running)

    async def _go_on(self, message: str) -> str | None:
        assert self._running is not None
        assert self._answer is not None
        self._answer.set_result(message)
        return await self._until_asked(self._running)

    async def _until_asked(self, running: asyncio.Task[None]) -> str | None:
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked = asked
        both: set[asyncio.Future[Any]] = {running, asked}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        self._running = None
        running.result()
        return None


async def _end(running: asyncio.Task[None]) -> None:
    """Cancel it and wait for its end; what it raises meanwhile is dropped."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()


def run_in_loop(call: Coroutine[Any, Any, _Found]) -> _Found:
    """What it returns, in the event loop of this process."""
    return asyncio.run_coroutine_threadsafe(call, _loop_of(os.getpid())).result()


_starting = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Its event loop, in a thread that ends with it; one for each process, since a fork has no threads of the other."""
    with _starting:
        if process not in _loops:
            loop = _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
        return _loops[process]
