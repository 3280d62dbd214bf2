"""The campaign on a rented GPU: everything that only a GPU can show, within so many minutes.

Each part is a command of its own with a limit, in order of value. What it measured is read from the files that the
command writes as it goes, so a part that is cut off keeps what it had. The page (`gpu.md` in the folder) is written
anew after each part: failures first, then one row per figure with date and card. Called again with the same folder,
the campaign goes on with the parts that have not ended.

    tests        `tests/gpu` of the checkout
    quickstart   the quickstart with generator and trainer on the device: has it learned?
    colocated    `bench gpu-colocated`: the rows that say most; others: the rest of them
    NAME         `bench policies` of one policy at full size: acting with 1, 16 and 32 rows, a training micro-batch,
                 updates with a frozen prefix
    language     an update of a 0.6B language model with LoRA on sequences of 16k tokens
    compiled     passes of π0 by `torch.compile` beside the plain ones

--tiny: the same parts, as small as they can be, on any machine.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyrhythm.config.catalog import need
from polyrhythm.errors import ConfigError
from polyrhythm.files import atomic_write
from polyrhythm.observe.intervals import rate_in_words
from polyrhythm_bench.cases import policies
from polyrhythm_bench.harness.kept import KeptResults, content_of
from polyrhythm_bench.harness.markdown import wrap_prose
from polyrhythm_bench.workloads import colocated

log = logging.getLogger(__name__)

PAGE, LOGS = "gpu.md", "logs"
_ROWS = (1, 16, 32)
#: Seconds that an ended command has to clean up before it is killed.
_GRACE_S = 15.0
#: Seconds that a timed command's start and end take at most.
_START_S = 60.0
#: A refusal since the machine lacks something, by its code; any other is a failure.
_LACKING = re.compile(r"polyrhythm: error: PR[24]")
DONE, FAILED, CUT, SKIPPED = "done", "failed", "cut off", "skipped"


class Figure(NamedTuple):
    """One row of the page. beside: what others published, or an aim; date: when it was measured, if not when its part
    ended."""

    name: str
    value: str
    beside: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """command: without `python -m`; limit_s: its own; least_s: with less time left it is not begun; figures: read from
    its files, as far as it came; needs: packages; why_not: a sentence, if it cannot run here; anew: what a command that
    cannot go on left, removed before the next try; left: what an orderly end has left to do, "" if nothing; timed: it
    takes --minutes."""

    name: str
    command: Sequence[str]
    limit_s: float
    least_s: float
    figures: Callable[[], list[Figure]]
    needs: Sequence[str] = ()
    why_not: str = ""
    anew: Path | None = None
    left: Callable[[], str] = str
    timed: bool = False


def run(out: Path, minutes: float = 12.0, *, tiny: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """All parts that the folder lacks, or those of `only`, in so many minutes.

    Returns the card, the page's path, `failed` (part, how it ended), `figures` (part, figure, value, beside, date) and
    `not_run` (part, why). ConfigError: no device, or results of another device in the folder.
    """
    if not tiny and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu: torch sees no CUDA device here; run it where there is one, or add --tiny to try the campaign "
            "on this machine"
        )
    ends = time.monotonic() + 60.0 * minutes
    campaign = Campaign(out, scene(tiny=tiny), parts(out, tiny=tiny))
    campaign.go(ends, only)
    return campaign.result()


def scene(*, tiny: bool) -> dict[str, Any]:
    """What the results of a folder have in common."""
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() and not tiny else "a CPU"
    return {"card": card, "tiny": tiny, "torch": torch.__version__}


class Campaign:
    """The parts in their order, and what the folder says of each."""

    def __init__(self, out: Path, scene: Mapping[str, Any], parts: Sequence[Part]) -> None:
        self._out, self._scene = out, scene
        self._parts = {part.name: part for part in parts}
        self._kept = KeptResults(out / "parts", scene)
        self._ended = {part.name: found for part in parts if (found := self._kept.read(part.name))}
        self._waiting: dict[str, str] = {}

    def go(self, ends: float, only: Sequence[str] = ()) -> None:
        """Run what has not ended well; what failed before comes last."""
        left = [name for name in only or self._parts if self._status(name) != DONE]
        for name in sorted(left, key=lambda name: self._status(name) in (FAILED, CUT)):
            part, rest_s = self._parts[name], ends - time.monotonic()
            if why := part.why_not or _missing(part.needs):
                self._end(part, SKIPPED, why, 0.0)
            elif rest_s < part.least_s:
                self._waiting[name] = f"{max(rest_s, 0):.0f} s were left and it takes {part.least_s:.0f} or more"
            else:
                log.info("%s: at most %.0f s", name, min(part.limit_s, rest_s))
                self._end(part, *_run_part(part, self._out, min(part.limit_s, rest_s)))
            self._write_page()
        self._write_page()

    def result(self) -> dict[str, Any]:
        ended = [(self._parts[name], found) for name, found in self._ended.items()]
        return {
            "card": self._scene["card"],
            "page": str(self._out / PAGE),
            "failed": [
                {"part": part.name, "status": found["status"], "said": found["said"]}
                for part, found in ended
                if found["status"] in (FAILED, CUT)
            ],
            "figures": [
                {"part": part.name, **figure._asdict(), "date": figure.date or found["date"]}
                for part, found in ended
                for figure in part.figures()
            ],
            "not_run": [
                {"part": name, "why": why}
                for name in self._parts
                if (why := self._waiting.get(name) or (self._status(name) == SKIPPED and self._ended[name]["said"]))
            ],
        }

    def _status(self, name: str) -> str:
        found = self._ended.get(name)
        return found["status"] if found else ""

    def _end(self, part: Part, status: str, said: str, seconds: float) -> None:
        date = datetime.now(UTC).date().isoformat()
        self._ended[part.name] = {"status": status, "said": said, "seconds": round(seconds, 1), "date": date}
        self._kept.write(part.name, self._ended[part.name])
        log.info("%s: %s in %.0f s%s", part.name, status, seconds, f": {said}" if said else "")

    def _write_page(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._out / PAGE) as unfinished:
            unfinished.write_text(page(self.result(), self._scene), encoding="utf-8")


def page(result: Mapping[str, Any], scene: Mapping[str, Any]) -> str:
    """The page: failures, figures, what was not run."""
    small = " --tiny" if scene["tiny"] else ""
    text = f"# The campaign on {scene['card']}\n\nBy `polyrhythm bench gpu{small}`, torch {scene['torch']}.\n"
    if result["failed"]:
        text += "\n## Failed\n\n" + "".join(f"- {x['part']}: {x['status']}. {x['said']}\n" for x in result["failed"])
    text += "\n| part | figure | value | beside | date | card |\n|---|---|---|---|---|---|\n"
    for x in result["figures"]:
        cells = (x["part"], x["name"], x["value"], x["beside"], x["date"], scene["card"])
        text += f"| {' | '.join(cells)} |\n"
    if result["not_run"]:
        text += "\n## Not run\n\n" + "".join(f"- {x['part']}: {x['why']}.\n" for x in result["not_run"])
    return wrap_prose(text)


def _missing(packages: Iterable[str]) -> str:
    missing = [package for package in packages if not need(package).found]
    return f"needs the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else ""


def _run_part(part: Part, out: Path, limit_s: float) -> tuple[str, str, float]:
    """Run a part's command in a session of its own: its status, its last words, and its seconds."""
    began, logs = time.monotonic(), out / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    if part.anew is not None:
        shutil.rmtree(part.anew, ignore_errors=True)
    words = [sys.executable, "-m", *part.command]
    if part.timed:
        words += ["--minutes", f"{max(limit_s - _START_S, limit_s / 4) / 60:.2f}"]
    # MuJoCo sets it in a process that has drawn, and the command may draw by another backend.
    variables = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    with (logs / f"{part.name}.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(  # noqa: S603
            words, stdout=said, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process)
    last = _last_words(logs / f"{part.name}.txt")
    seconds = time.monotonic() - began
    if code is None:
        return CUT, f"after {seconds:.0f} s; last: {last}", seconds
    if code == 2 and _LACKING.match(last):
        return SKIPPED, last.removeprefix("polyrhythm: error: "), seconds
    if code == 0 and (left := part.left()):
        return CUT, left, seconds
    return (DONE, "", seconds) if code == 0 else (FAILED, f"exit status {code}; last: {last}", seconds)


def _end_session(process: subprocess.Popen[Any]) -> None:
    """End the command in order, then by force, with all that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_words(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


# The parts. Figures of others: the pages of their projects, see docs/design/measuring-and-planning.md.


def parts(out: Path, *, tiny: bool) -> list[Part]:
    """In order of value."""
    vla, metaworld = ("transformers", "safetensors"), ("metaworld", "mujoco")
    return [
        _tests(out),
        _quickstart(out, tiny=tiny, needs=metaworld),
        *_colocated(out, tiny=tiny, needs=(*vla, *metaworld)),
        *(_passes(out, kind, tiny=tiny, needs=vla) for kind in policies.TYPES),
        _language(out, tiny=tiny, needs=vla),
        _compiled(out, tiny=tiny, needs=vla),
    ]


def _tests(out: Path) -> Part:
    words = ["pytest", "tests/gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    why = "" if Path("tests/gpu").is_dir() else "tests/gpu is not in this folder; call it in the root of a checkout"
    log_file = out / LOGS / "tests.txt"
    return Part("tests", words, 240, 60, lambda: test_figures(log_file), needs=("pytest",), why_not=why)


_RESULT = re.compile(r"^(tests/gpu/\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def test_figures(log_file: Path) -> list[Figure]:
    """Of the tests that have ended; pytest prints each when it has."""
    if not log_file.is_file():
        return []
    found = _RESULT.findall(log_file.read_text(encoding="utf-8", errors="replace"))
    lost = [name for name, result in found if result in ("FAILED", "ERROR")]
    counts = Counter(result for _, result in found)
    return [
        Figure("passed, failed, skipped", f"{counts['PASSED']}, {len(lost)}, {counts['SKIPPED']}"),
        *(Figure("failed", name) for name in lost[:10]),
    ]


def _quickstart(out: Path, *, tiny: bool, needs: Sequence[str]) -> Part:
    folder = out / "quickstart"
    words = ["polyrhythm", "train", "quickstart", "--out", str(folder)]
    if tiny:
        small = "training.versions=6 supervised.steps=12 evaluation.episodes=4 demonstrations.episodes_per_task=2"
        words += [*small.split(), "rollout.rows=4", "training.mini_batch_samples=8"]
    else:
        device = "placement.generators.devices=0 placement.trainer.devices=0"
        words += [*device.split(), "rollout.simulators=8", "rollout.rows=4", "rollout.sharding=even:1"]
    return Part("quickstart", words, 330, 20 if tiny else 240, lambda: _learned(folder), needs, anew=folder)


def _learned(folder: Path) -> list[Figure]:
    file, metrics = folder / "summary.json", folder / "metrics.jsonl"
    if not file.is_file():
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
        last = next((found for line in reversed(lines) if "env/success_once" in (found := json.loads(line))), None)
        return (
            [Figure(f"success in training, update {last['step']}", f"{last['env/success_once']:.2f}")] if last else []
        )
    summary = json.loads(file.read_text(encoding="utf-8"))
    before, after = (rate_in_words(summary[name]) for name in ("before", "after"))
    learned = summary["after"]["low"] > summary["before"]["high"]
    earlier = "of 200 versions, an H200 (2026-11-27)"
    return [
        Figure("greedy success, before and after", f"{before} → {after}, {'learned' if learned else 'not learned'}"),
        Figure("transitions/s", f"{summary['transitions_per_s']:,.0f}", f"5,819 {earlier}"),
        Figure("the whole job", f"{summary['wall_s']['total']:.0f} s", f"102 s {earlier}"),
    ]


def _colocated(out: Path, *, tiny: bool, needs: Sequence[str]) -> list[Part]:
    """The rows that say most, and the others."""
    every = colocated.rows_of(colocated.scene_of(tiny=tiny))
    first = ("lockstep", "full_async", "full_async_process") if tiny else colocated.FIRST[:4]
    others = ["full_async_unlent"] if tiny else [name for name in every if name not in first]
    folder = out / "colocated"
    return [_rows(name, folder, rows, tiny, needs) for name, rows in (("colocated", first), ("others", others)) if rows]


def _rows(name: str, folder: Path, names: Sequence[str], tiny: bool, needs: Sequence[str]) -> Part:
    scene = colocated.scene_of(tiny=tiny)
    rows = {name: colocated.rows_of(scene)[name] for name in names}
    words = ["polyrhythm", "bench", "gpu-colocated", "--json", "--out", str(folder), "--only", ",".join(rows)]
    files = {row: folder / f"{row}.json" for row in rows}

    def left() -> str:
        missing = [row for row, place in rows.items() if not files[row].is_file() and not colocated.why_not(*place)]
        return f"these rows are left: {', '.join(missing)}" if missing else ""

    def figures() -> list[Figure]:
        return _colocated_figures(
            {row: (rows[row][0], content_of(file)) for row, file in files.items() if file.is_file()}
        )

    limit = (1.0 if tiny else 1.5) * scene.minimum_s * len(rows) + _START_S
    least = 20 if tiny else 100
    return Part(name, [*words, *(["--tiny"] if tiny else [])], limit, least, figures, needs, left=left, timed=True)


def _colocated_figures(kept: Mapping[str, tuple[str, Mapping[str, Any]]]) -> list[Figure]:
    """kept: mode and content of each row's file. The bound is what the device could do if it never waited: the
    transitions of a lock-step version over the time in which its generator or trainer was busy, which take turns."""
    figures = []
    found = {name: (mode, content["result"]) for name, (mode, content) in kept.items()}
    rates = {name: one["transitions_per_s"] for name, (_, one) in found.items()}
    for name, (mode, one) in found.items():
        busy = ", ".join(f"{station} {100 * share:.0f}%" for station, share in one["busy"].items())
        value = f"{rates[name]:,.0f} transitions/s, {one['versions']} versions, lag {one['lag_mean']:.2f}; busy: {busy}"
        aim = "aim: 600 transitions/s" if mode.startswith("full_async") else ""
        figures.append(Figure(name, value, aim, kept[name][1]["date"]))
    figures = [*_sharing_figures({name: (mode, rates[name]) for name, (mode, _) in found.items()}), *figures]
    full = max((rates[name] for name, (mode, _) in found.items() if mode.startswith("full_async")), default=None)
    lock = {name: one for name, (mode, one) in found.items() if mode == "lockstep"}
    if full is None or not lock:
        return figures
    first = max(rates[name] for name in lock)
    bound = max(rates[name] / sum(_computing(one["busy"])) for name, one in lock.items())
    return [
        Figure("full asynchrony over the best lock-step", f"{full / first:.2f}", "1.85 (RL-VLA³, table 5)"),
        Figure("share of the device's bound", f"{full / bound:.2f} of {bound:,.0f} transitions/s", "aim: 0.92"),
        *figures,
    ]


def _sharing_figures(rates: Mapping[str, tuple[str, float]]) -> list[Figure]:
    """Which sharing of the device is the better default: where each has been measured with the same drawing. rates:
    mode and transitions/s of each row."""
    found: dict[str, dict[str, float]] = {}
    for name, (mode, rate) in rates.items():
        if mode in colocated.SHARINGS:
            found.setdefault(name.removeprefix(mode).lstrip("-"), {})[mode] = rate
    figures = []
    for drawing, own in found.items():
        if len(own) > 1 and (base := own.get("full_async")):
            others = ", ".join(
                f"{colocated.MODES[mode].sharing} {rate / base:.2f}"
                for mode, rate in own.items()
                if mode != "full_async"
            )
            best = colocated.MODES[max(own, key=own.__getitem__)].sharing
            where = f", {drawing}" if drawing else ""
            said = f"{best} is the better ({others} times share; default: share)"
            figures.append(Figure(f"placement.sharing{where}", said, "provisional until an H100 or H200 has said it"))
    return figures


def _computing(busy: Mapping[str, float]) -> list[float]:
    return [share for station, share in busy.items() if not station.startswith("simulator")]


#: Seconds to make a chunk of actions by vla-eval on an A100, and observations per second of CogACT 7B with 16 rows.
_CHUNK_S = {"pi05": "0.11 s (vla-eval, an A100)", "groot_n1d5": "0.24 s (vla-eval, GR00T N1.7 on an A100)"}
_OBSERVATIONS = {"openvla_oft": "486 (vla-eval, CogACT 7B)"}


def _passes(out: Path, kind: str, *, tiny: bool, needs: Sequence[str]) -> Part:
    folder, size = out / "policies", "tiny" if tiny else "released"
    rows = (1,) if tiny else _ROWS
    words = ["polyrhythm", "bench", "policies", "--types", kind, "--sizes", size, "--rows", ",".join(map(str, rows))]
    words += ["--repeats", "1" if tiny else "3", "--device", "cpu" if tiny else "cuda", "--out", str(folder), "--json"]
    names = [*(f"act-{n}" for n in rows), f"train-{policies.TRAIN_ROWS}", "updates"]
    files = {name: folder / f"{kind}-{size}-{name}.json" for name in names}
    return Part(kind, words, 240, 10 if tiny else 60, lambda: _pass_figures(kind, files), needs)


def _pass_figures(kind: str, files: Mapping[str, Path]) -> list[Figure]:
    """What is there: time, share of the roofline and ratio to a plain forward of each pass."""
    figures: list[Figure] = []
    for name, file in files.items():
        if not file.is_file():
            continue
        content = content_of(file)
        found, date = content["result"], content["date"]
        if name == "updates":
            ways = f"{found['every_s']:.2f} s, {found['once_s']:.2f} s, {found['lent_s']:.2f} s"
            said = "update; prefix in every epoch, once, lent"
            figures.append(Figure(said, f"{ways}; lending gains {found['gain']:.2f}", date=date))
            continue
        action, rows = name.split("-")
        ms = found.get("captured_ms") or found["ms"]
        value = f"{ms:.1f} ms, {found['of_roofline']:.2f} of the roofline, {found['ratio']:.2f} times a plain forward"
        figures.append(Figure(f"{action}, rows {rows}", value, _CHUNK_S.get(kind, "") if name == "act-1" else "", date))
        if name == "act-16":
            figures.append(
                Figure("observations/s, rows 16", f"{1e3 * 16 / ms:,.0f}", _OBSERVATIONS.get(kind, ""), date)
            )
    return figures


def _language(out: Path, *, tiny: bool, needs: Sequence[str]) -> Part:
    """Layers and widths of Qwen3-0.6B."""
    sizes = {"rows": 4, "median": 8192, "longest": 16384, "width": 1024, "layers": 28, "hidden": 3072}
    sizes |= {"vocabulary": 151936, "micro-batch-steps": 1}
    if tiny:
        sizes = {"rows": 2, "median": 16, "longest": 64, "width": 64, "layers": 1, "hidden": 64, "vocabulary": 256}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--sigma", "0", "--train", "lora", "--repeats", "2", "--way", "packed"]
    command = ["polyrhythm_bench.cases.language_update", *words, "--device", "cpu" if tiny else "cuda"]
    return Part("language", command, 120, 10 if tiny else 60, lambda: _tokens(out / LOGS / "language.txt"), needs)


def _tokens(file: Path) -> list[Figure]:
    found = re.findall(r"^\{.*\}$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else []
    if not found:
        return []
    said = json.loads(found[-1])
    return [
        Figure("training tokens/s, float32", f"{said['tokens_s']:,.0f}", "13.3k (prime-rl, LoRA at 16k, an H100)"),
        Figure("memory of the update", f"{said['memory_mb'] / 1e3:.1f} GB"),
    ]


def _compiled(out: Path, *, tiny: bool, needs: Sequence[str]) -> Part:
    words = ["--size", "tiny", "--rows", "1", "--no-training", "--device", "cpu", "--repeats", "1"]
    if not tiny:
        words = ["--size", "released", "--rows", "1,32", "--device", "cuda", "--repeats", "7"]
    command = ["polyrhythm_bench.cases.compiled", "--type", "pi0", *words]
    return Part("compiled", command, 240, 10 if tiny else 90, lambda: _gains(out / LOGS / "compiled.txt"), needs)


def _gains(file: Path) -> list[Figure]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines if line.startswith('{"pass"')]
    return [
        Figure(
            f"torch.compile, {one['pass']}",
            f"{one['compiled_ms']:.1f} of {one['plain_ms']:.1f} ms, {one['ratio']:.2f}; compiled in "
            f"{one['compile_s']:.0f} s; results differ by {one['difference']:.1g}",
        )
        for one in found
    ]
