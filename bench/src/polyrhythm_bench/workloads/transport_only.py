"""The sleeping stages of a scene, joined by bare messages: the cost of processes and transport alone.

Simulators with a thread for each env batch, generators, and between them a process that hands the requests waiting to
the next generator that is free: hosted as by the local launcher, over the same sockets, but no environment, policy,
record, sample or training. The difference between a run and this is the run's own computing. It is comparable with
runs that do not wait for their trainer, and whose best batching does not wait for more requests.

    env batch → main: its number      main → generator: the numbers of a pass
    generator → env batch: b""        generator → main: its number, and how many it served
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import repeat
from typing import Any

import zmq

from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.transport.sockets import Inbox, Outbox, endpoint
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.harness.worker import Answer, Worker
from polyrhythm_bench.workloads.scene import StageScenario

Context = zmq.Context[zmq.Socket[bytes]]

#: Seconds: of warm-up; that workers go on after the conductor; of one wait for a message.
_WARM_UP_S, _LONGER_S, _PATIENCE_S = 1.0, 0.5, 0.5


def rate(scene: StageScenario, most: int, seconds: float = 6.0) -> float:
    """Transitions per second, in a run of `seconds` after a warm-up. Returns once all its processes have ended.

    most: env batches that a pass serves at most.
    """
    with ExitStack() as stack:
        memory = SharedRunFolder({})
        stack.callback(memory.remove)
        folder = str(memory.folder)
        workers = [stack.enter_context(closing(worker)) for worker in _workers(scene, folder)]
        context = stack.enter_context(Context())
        inbox = stack.enter_context(closing(Inbox(context, endpoint("ipc", folder, "main"))))
        generators = [_outbox(stack, context, folder, f"generator-{number}") for number in range(scene.generators)]
        for worker in workers:
            worker.ask(seconds=0.0)  # it is ready
        for worker in workers:
            worker.begin(seconds=_WARM_UP_S + seconds + _LONGER_S)
        served = _conduct(inbox, generators, most, seconds)
        for worker in workers:
            worker.answer()
    return served * scene.rows / seconds


def _workers(scene: StageScenario, folder: str) -> Iterator[Worker]:
    """A process for each simulator and generator."""
    told: dict[str, Any] = {"folder": folder, "scene": scene.model_dump()}
    each = scene.env_batches // scene.simulators
    for first in range(0, scene.env_batches, each):
        yield Worker(f"{__name__}:simulator", **told, first=first, count=each)
    for number in range(scene.generators):
        yield Worker(f"{__name__}:generator", **told, number=number)


def _conduct(inbox: Inbox, generators: list[Outbox], most: int, seconds: float) -> int:
    """Hand requests to free generators; how many were served in the time that counts."""
    begin = time.monotonic() + _WARM_UP_S
    waiting, free, served = array("H"), list(range(len(generators))), 0
    while (now := time.monotonic()) < begin + seconds:
        content = inbox.receive(_PATIENCE_S)
        if content is None:
            continue
        numbers = array("H", content)
        if len(numbers) == 1:
            waiting.extend(numbers)
        else:
            generator, passed = numbers
            free.append(generator)
            served += passed if now >= begin else 0
        if waiting and free:
            generators[free.pop(0)].send(waiting[:most].tobytes())
            waiting = waiting[most:]
    return served


@contextmanager
def simulator(folder: str, scene: dict[str, Any], first: int, count: int) -> Iterator[Answer]:
    """The env batches `first` and after, each in its thread."""
    settings = StageScenario.model_validate(scene)
    distribution = parse_distribution(settings.sim_latency)
    numbers = range(first, first + count)
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        inboxes = [stack.enter_context(closing(Inbox(context, endpoint("ipc", folder, str(n))))) for n in numbers]
        main = _outbox(stack, context, folder, "main")

        def step(number: int, inbox: Inbox, until: float) -> None:
            rng, own = random.Random(f"{settings.seed}/{number}"), array("H", [number]).tobytes()
            while time.monotonic() < until:
                time.sleep(distribution.sample(rng))
                main.send(own)
                while inbox.receive(_PATIENCE_S) is None and time.monotonic() < until:
                    pass

        def answer(seconds: float) -> None:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(step, numbers, inboxes, repeat(time.monotonic() + seconds)))

        yield answer


@contextmanager
def generator(folder: str, scene: dict[str, Any], number: int) -> Iterator[Answer]:
    """Sleeps for a pass, then answers each of it."""
    settings = StageScenario.model_validate(scene)
    cost, rng = parse_cost(settings.infer_latency), random.Random(f"{settings.seed}/generator-{number}")
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        inbox = stack.enter_context(closing(Inbox(context, endpoint("ipc", folder, f"generator-{number}"))))
        main = _outbox(stack, context, folder, "main")
        env_batches = [_outbox(stack, context, folder, str(other)) for other in range(settings.env_batches)]

        def answer(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                content = inbox.receive(_PATIENCE_S)
                if content is None:
                    continue
                asked = array("H", content)
                time.sleep(cost.draw(rng, len(asked) * settings.rows))
                for other in asked:
                    env_batches[other].send(b"")
                main.send(array("H", [number, len(asked)]).tobytes())

        yield answer


def _outbox(stack: ExitStack, context: Context, folder: str, name: str) -> Outbox:
    return stack.enter_context(closing(Outbox(context, endpoint("ipc", folder, name))))
