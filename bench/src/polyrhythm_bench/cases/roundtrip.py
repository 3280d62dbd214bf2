"""Time from an observation to its action through the local launcher, beside the least that two processes need.

The round trip: a simulator with one row shows a 512×512 RGB image (786,432 bytes) to a policy that does nothing, in
processes of their own, with the run's own conductor, loop and launcher. It is timed in the simulator's process, from
the moment that the environment is asked for its observation, before it writes it, to the moment that it is told to
step: writing, recording, the request, the decision, gathering, the answer and recording it are included.

Bare: this process writes the same image into shared memory and sends one message over ipc; another copies the image
and sends a message with a row's answer back. It is timed from before the writing to the answer's arrival. Both write to
as many places in turn, and take turns with each other, in the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment
from polyrhythm_bench.harness.worker import Answer, Worker
from polyrhythm_bench.workloads.stopwatch_env import ACTION_DIM, IMAGE_SHAPE

#: Largest ratio of the two medians that the design allows.
LIMIT_RATIO = 4.0
#: Steps of an episode, which is evaluated whole; with one entry more, the places written to in turn.
_EPISODE = 64
#: Bytes like a row's answer: actions, log-probs, value and version.
_ANSWER = bytes(2 * 4 * ACTION_DIM + 4 + 8)


def run(steps: int = 1000, repeats: int = 5) -> dict[str, Any]:
    """Time `repeats` turns of at least `steps` round trips each, after one turn to warm up.

    Returns `p50_us`, `p99_us`, `bare_p50_us` and `bare_p99_us` over all turns, `ratio` of the medians, `ratios` of the
    medians turn by turn, and whether the ratio is within the limit.
    """
    episodes = -(-steps // _EPISODE)
    bare: list[NDArray[np.int64]] = []
    with tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder:
        times = Path(folder) / "times"
        with _asker() as ask_bare, closing(_pipeline(times, Path(folder))) as pipeline:
            for turn in range(repeats + 1):
                pipeline.loop.evaluate(f"turn {turn}", held_out(episodes, turn, 1, greedy=True))
                bare.append(ask_bare(episodes * _EPISODE))
        waits = np.split(np.fromfile(times, np.int64), repeats + 1)
    return _summary(waits[1:], bare[1:])


def _summary(waits: Sequence[NDArray[np.int64]], bare: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    p50, p99 = _percentiles(waits)
    bare_p50, bare_p99 = _percentiles(bare)
    ratio = p50 / bare_p50
    return {
        "p50_us": p50,
        "p99_us": p99,
        "bare_p50_us": bare_p50,
        "bare_p99_us": bare_p99,
        "ratio": ratio,
        "limit_ratio": LIMIT_RATIO,
        "within_limit": ratio <= LIMIT_RATIO,
        "ratios": [float(np.median(a) / np.median(b)) for a, b in zip(waits, bare, strict=True)],
        "round_trips": sum(map(len, waits)),
    }


def _percentiles(turns: Sequence[NDArray[np.int64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.concatenate(turns), [50, 99]) * 1e-3
    return float(p50), float(p99)


def config(times: Path) -> RunConfig:
    """One simulator with one row, one generator, a batch as soon as there is a request."""
    here = "polyrhythm_bench.workloads"
    return validate(
        {
            "name": "roundtrip",
            "env": {
                "type": f"{here}.stopwatch_env:StopwatchSettings", "episode_steps": _EPISODE, "times": str(times)
            },
            "policy": {"type": f"{here}.null_policy:NullSettings"},
            "rollout": {"rows": 1},
            "batching": {"type": "dynamic", "max_rows": 1, "max_wait_ms": 0.0},
            "training": {"versions": 0, "mini_batch_samples": 1},
        }
    )  # fmt: skip


def _pipeline(times: Path, folder: Path) -> Any:
    checked = validate_run(config(times))
    return build_pipeline(RunContext(checked.config, checked.policy, folder, trainer=False))


# ---------------------------------------------------------------- bare


@contextmanager
def _asker() -> Iterator[Any]:
    """Ask the other process so many times: nanoseconds of each."""
    memory = SharedRunFolder({"image": (_EPISODE + 1) * int(np.prod(IMAGE_SHAPE))})
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with (
            Worker(f"{__name__}:answerer", folder=str(memory.folder)) as other,
            context.socket(zmq.PUSH) as questions,
            context.socket(zmq.PULL) as answers,
        ):
            answers.bind(f"ipc://{memory.folder}/answers")
            questions.connect(f"ipc://{memory.folder}/questions")
            shared = _images(memory.folder)
            image = np.random.default_rng(0).integers(0, 256, IMAGE_SHAPE, np.uint8)

            def ask(count: int) -> NDArray[np.int64]:
                other.begin(count=count)
                waits = np.zeros(count, np.int64)
                for number in range(count):
                    begin = time.perf_counter_ns()
                    shared[number % len(shared)] = image
                    questions.send(b"")
                    answers.recv()
                    waits[number] = time.perf_counter_ns() - begin
                other.answer()
                return waits

            yield ask
    finally:
        context.destroy(linger=0)
        memory.remove()


@contextmanager
def answerer(folder: str) -> Iterator[Answer]:
    """Answers `count` questions: copies the image, sends what a row's answer takes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.PULL) as questions, context.socket(zmq.PUSH) as answers:
            questions.bind(f"ipc://{folder}/questions")
            answers.connect(f"ipc://{folder}/answers")
            shared = _images(Path(folder))
            own = np.zeros(IMAGE_SHAPE, np.uint8)

            def answer(count: int) -> None:
                for number in range(count):
                    questions.recv()
                    own[:] = shared[number % len(shared)]
                    answers.send(_ANSWER)

            yield answer
    finally:
        context.destroy(linger=0)


def _images(folder: Path) -> NDArray[np.uint8]:
    """The places written to in turn."""
    return np.frombuffer(open_segment(folder, "image"), np.uint8).reshape(-1, *IMAGE_SHAPE)
