"""Measures the report: how long it takes to write, its size, and how long Chromium needs until all figures are drawn.

    python bench/scripts/report_page.py [RUN ...] [--bars 1000000] [--picture FILE]

Without RUN it makes a run's folder with that many bars in its trace (16 simulators of 8 slots, two generators, a
trainer) and 2,000 updates. Opening is the mean of three times: by the clock (`performance.now` in the second frame
after the last figure was drawn) and the processor time of the page's main thread and of its process. --picture writes
what the report shows from its results to its timeline.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean

from polyrhythm.plugins.report.page import write_report
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm_bench.browser import Page

_SIMULATORS, _SLOTS, _GENERATORS, _UPDATES = 16, 8, 2, 2000


def make_run(folder: Path, bars: int) -> None:
    """A run's folder with metrics and a trace of this many bars."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: synthetic\n")
    length = bars * 0.0008
    with (folder / "metrics.jsonl").open("w") as file:
        for update in range(_UPDATES):
            line = {
                "step": update,
                "time_s": 20 + (update + 1) * length / _UPDATES,
                "throughput/transitions": 500.0 * (update + 1),
                "throughput/transitions_per_s": 800 + 50 * rng.random(),
                "env/episodes": 8.0,
                "env/success_once": min(1.0, update / _UPDATES + 0.1 * rng.random()),
                "env/return": update / _UPDATES,
                "train/actor/entropy_loss": 2 - update / _UPDATES + 0.1 * rng.random(),
                "train/actor/grad_norm": rng.random(),
                "staleness/lag_mean": rng.random(),
                "staleness/lag_max": 1.0,
                "trainer/idle_ratio": rng.random(),
            }
            file.write(json.dumps(line) + "\n")
    with TraceWriter(folder / "trace.json") as trace:
        updates = _UPDATES * 2
        for update in range(_UPDATES):
            begin = update * length / _UPDATES
            trace.complete("trainer", "trainer", f"update {update}", begin + 0.2, begin + 0.9 * length / _UPDATES)
            trace.complete("trainer", "trainer publishes", f"publish {update}", begin, begin + 0.02)
        slots = [f"simulator-{s}.0/{slot}" for s in range(_SIMULATORS) for slot in range(_SLOTS)]
        each = (bars - updates) * 6 // 7 // len(slots)
        for slot in slots:
            now = rng.random() * 0.1
            for bar in range(each):
                end = now + length / each * (0.5 + rng.random())
                trace.complete("slots", slot, ("stepping", "thread", "generator", "in_batch")[bar % 4], now, end)
                now = end
        passes = (bars - updates - each * len(slots)) // _GENERATORS
        for generator in range(_GENERATORS):
            for number in range(passes):
                begin = number * length / passes
                name = f"{1 + rng.randrange(32)} requests"
                trace.complete("generators", f"generator-{generator}", name, begin, begin + 0.6 * length / passes)


def measure(path: Path) -> dict[str, float]:
    """Milliseconds until all figures are drawn, and of the processor."""
    with Page(1200, 900) as page:
        page.call("Performance.enable", timeDomain="threadTicks")
        page.open(path.as_uri())
        assert page.errors == [], page.errors
        metrics = {one["name"]: one["value"] for one in page.call("Performance.getMetrics")["metrics"]}
        drawn = float(page.evaluate("document.documentElement.dataset.drawnMs"))
        return {"drawn_ms": drawn, "thread_ms": 1e3 * metrics["ThreadTime"], "process_ms": 1e3 * metrics["ProcessTime"]}


def take_picture(path: Path, picture: Path) -> None:
    with Page(1100, 800) as page:
        page.open(path.as_uri())
        page.evaluate("document.querySelectorAll('nav, .switches, .tools').forEach((node) => node.remove())")
        page.evaluate(
            "document.querySelectorAll('section').forEach((node) => "
            "['success', 'timeline'].includes(node.id) || node.remove())"
        )
        page.evaluate(
            "document.querySelector('#timeline canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'u'}))"
        )
        page.evaluate("document.querySelector('.timeline-tools button:nth-of-type(6)').click()")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.picture(picture, whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--bars", type=int, default=1_000_000)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = arguments.runs
        if not runs:
            runs = [Path(temporary) / "synthetic" / "run"]
            make_run(runs[0], arguments.bars)
        for number, run in enumerate(runs):
            begin, worked = time.perf_counter(), time.process_time()
            path = write_report(run, Path(temporary) / f"report-{number}.html")
            found = {"write_s": time.perf_counter() - begin, "write_cpu_s": time.process_time() - worked}
            found["mb"] = path.stat().st_size / 1e6
            times = [measure(path) for _ in range(3)]
            found |= {name: fmean(one[name] for one in times) for name in times[0]}
            print(
                json.dumps({"run": run.name, **{k: round(v, 2) for k, v in found.items()}, "load": os.getloadavg()[0]})
            )
            if arguments.picture is not None:
                take_picture(path, arguments.picture)


if __name__ == "__main__":
    main()
