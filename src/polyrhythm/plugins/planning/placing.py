"""`polyrhythm plan RECIPE --gpus N`: the ranked placements, the settings to paste, and what more would buy."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, TextIO

from polyrhythm.cli import show
from polyrhythm.config.load import load_config
from polyrhythm.config.recipes import recipe_word
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.planning.arrangement import Arrangement, arranged, arrangement_of, changed_lines, devices_text
from polyrhythm.plugins.planning.judge import Prediction, predict
from polyrhythm.plugins.planning.judging import Judges, forkable_cores
from polyrhythm.plugins.planning.problem import PlacementProblem, RankedPlacement, problem_of
from polyrhythm.plugins.planning.profile import Profile, load_profile, refuse_other_recipe, this_machine
from polyrhythm.plugins.planning.search import AGAIN, MOST
from polyrhythm.readable import three_digits
from polyrhythm.runtime.devices import Devices

#: Placements in the table.
_SHOWN = 5
#: Placements within this share of the best are as good; of these, the one that changes least of the recipe comes first.
_EQUAL = 0.01
#: Of the placements with one more GPU, those that are judged in full.
_AGAIN_WIDER = 2
#: Settings changed by each what-if are not worth a word below this gain.
_NOTABLE = 0.005
#: Stations whose share of busy time is shown.
_BUSY = ("simulator", "generator", "trainer")
#: What the columns are.
LEGEND = (
    "rate: samples/s trained. busy %: simulators/generators/trainer. GB: of the fullest",
    "device. lag: versions, mean/largest. sim, gen: how many, on which devices. rows: env",
    "batches x rows/slots of a simulator. pass: most rows. micro: chunk steps at a time.",
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.run is None:
        raise ConfigError("plan --gpus needs a recipe; name one, or the path of a YAML file")
    devices = parse_devices(arguments.gpus, arguments.nodes)
    config = load_config(arguments.run, arguments.overrides)
    profile = find_profile(config, arguments.profile, shlex.quote(arguments.run))
    problem = problem_of(profile, config, devices)
    progress = JudgingProgress(sys.stderr)
    with progress, Judges(forkable_cores(), progress.judged) as judges:
        progress.begin(f"of at most {MOST + AGAIN} placements")
        found = by_least_change(config, problem.solve(judges=judges))
        progress.begin("with one more GPU, a generator, or twice the rows")
        own = judge_own(problem)
        more = list(what_more_buys(problem, found[0], judges))
    if arguments.json:
        print(json.dumps(as_data(config, profile, found, own, more), indent=2))
    else:
        print("\n".join(lines(config, profile, devices, found, own, more, arguments.run, given=arguments.overrides)))
    return 0


def parse_devices(gpus: str, nodes: int | None) -> Devices:
    """Devices from `--gpus 8 --nodes 2` or `--gpus 4,0`. ConfigError: not numbers, or they do not divide."""
    parts = gpus.split(",")
    if not all(part.strip().isdecimal() and len(part.strip()) < 6 for part in parts):
        raise ConfigError(f"--gpus = {gpus}: not a number of GPUs; write 8, or 4,0 for two nodes of 4 and 0")
    counts = [int(part) for part in parts]
    if len(counts) > 1:
        if nodes not in (None, len(counts)):
            raise ConfigError(f"--nodes = {nodes}: --gpus = {gpus} names {len(counts)} nodes; leave --nodes out")
    elif nodes is not None and nodes > 1:
        each, rest = divmod(counts[0], nodes)
        if rest:
            split = ",".join(str(each + (node < rest)) for node in range(nodes))
            raise ConfigError(f"--gpus = {gpus}: it does not divide by --nodes = {nodes}; write --gpus {split}")
        counts = [each] * nodes
    if len(counts) == 1:
        return Devices((("", counts[0]),))
    return Devices(tuple((f"node-{node}", count) for node, count in enumerate(counts)))


def find_profile(config: RunConfig, file: str | None, recipe: str | None = None) -> Profile:
    """The recipe's profile. recipe: what a command calls it. ConfigError: there is none, or it is of another recipe."""
    recipe = recipe or recipe_word(config.name)
    path = Path(file or f"{config.name}.profile.json")
    if file is None and not path.is_file():
        raise ConfigError(
            f"plan --gpus: there is no {path}; measure it with `polyrhythm profile {recipe}`, or name a file with "
            "--profile"
        )
    profile = load_profile(path)
    refuse_other_recipe(profile, config, recipe)
    here = this_machine().device
    if here and profile.machine.device and here != profile.machine.device:
        raise ConfigError(
            f"profile {str(path)!r}: it was measured on {profile.machine.device}, and this machine has {here}; measure "
            f"here with `polyrhythm profile {recipe}`, or plan where there is no GPU or the same one"
        )
    return profile


def by_least_change(config: RunConfig, found: Sequence[RankedPlacement]) -> list[RankedPlacement]:
    """The placements, of equally fast ones the one first that changes least of the recipe."""
    rest, ordered = list(found), list[RankedPlacement]()
    while rest:
        fastest = rest[0].prediction.samples_per_s
        equal = [one for one in rest if one.prediction.samples_per_s >= fastest * (1 - _EQUAL)]
        best = min(equal, key=lambda one: len(changed_lines(config, one.arrangement)))
        ordered.append(best)
        rest.remove(best)
    return ordered


class JudgingProgress:
    """One line on a terminal, written over and then away; elsewhere nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" else None
        self._what, self._count, self._best = "", 0, 0.0

    def begin(self, what: str) -> None:
        """what: of how many, or of which kind, are the placements that are judged from now on."""
        self._what, self._count, self._best = what, 0, 0.0

    def judged(self, one: Prediction) -> None:
        self._count += 1
        if not (one.over or one.halted):
            self._best = max(self._best, one.samples_per_s)
        self._write(f"judged {self._count} {self._what}, best so far {three_digits(self._best)} samples/s")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(f"\r{text}\x1b[K")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")


def judge_own(problem: PlacementProblem) -> Prediction | None:
    """What the recipe's own placement gives on these devices; None if they do not have what it names, or the profile
    has no times for where it is: a station on the CPU that was measured on a GPU, or the reverse."""
    try:
        one = arrangement_of(problem.config, problem.devices)
        if not problem.measured_there(one):
            return None
        return predict(problem.profile, arranged(problem.config, one), problem.devices, spec=problem.spec)
    except ConfigError:
        return None


def what_more_buys(
    problem: PlacementProblem, best: RankedPlacement, judges: Judges | None = None
) -> Iterator[tuple[str, float]]:
    """Each addition in words, and the gain in throughput as a share. One more GPU: by a search like that of `best`,
    which is in it."""
    before = best.prediction.samples_per_s
    if problem.devices.count:
        (name, count), *others = problem.devices.nodes
        wider = replace(problem, devices=Devices(((name, count + 1), *others)))
        again = wider.solve(also=moved_up(best.arrangement, count), again=_AGAIN_WIDER, judges=judges)
        yield "one more GPU", again[0].prediction.samples_per_s / before - 1
    one = best.arrangement
    changed = {
        "one more generator": _one_more_generator(one),
        "twice the rows": replace(one, rows=2 * one.rows, max_rows=2 * one.max_rows),
    }
    for text, found in zip(changed, problem.judge(list(changed.values()), judges=judges), strict=True):
        if found is not None:
            yield text, found.samples_per_s / before - 1


def moved_up(one: Arrangement, after: int) -> Arrangement:
    """The same arrangement where a device was added behind the first `after`, which it leaves idle."""
    kinds = ("simulator_devices", "generator_devices", "trainer_devices")
    places = {kind: tuple(n + (n >= after) for n in getattr(one, kind)) for kind in kinds}
    return replace(one, **places)  # type: ignore[arg-type]


def _one_more_generator(one: Arrangement) -> Arrangement:
    """With a second generator on each device of generators, or one more on the host."""
    return replace(one, generators=one.generators + max(1, len(one.generator_devices)))


# ------------------------------------------------------------ text and data


def lines(
    config: RunConfig,
    profile: Profile,
    devices: Devices,
    found: Sequence[RankedPlacement],
    own: Prediction | None,
    more: Sequence[tuple[str, float]],
    recipe: str,
    given: Sequence[str] = (),
) -> list[str]:
    """The answer as text. recipe: what the command calls it; given: the settings that it was planned with, with which
    the command begins."""
    machine = profile.machine
    where = f"{devices.count} x {machine.device or 'GPU'}" if devices.count else "cores alone"
    if len(devices.nodes) > 1:
        where += f" on {len(devices.nodes)} nodes"
    head = f"{config.name} on {where}, by the profile of {profile.date[:10]}; predicted, not measured"
    rows = [{"": str(rank), **_row(one)} for rank, one in enumerate(found[:_SHOWN], 1)]
    remarks = [f"{name}: {sentence}" for name, sentence in profile.remarks().items()]
    text = [head, *remarks, "", show.records(rows), *LEGEND, ""]
    best = found[0]
    if own is None:
        text.append("the recipe as it is: no prediction, as it names devices that are not there, or that have no times")
    else:
        gain = best.prediction.samples_per_s / own.samples_per_s - 1 if own.samples_per_s else 0.0
        fits = f"; it does not fit: {own.over}" if own.over else ""
        text.append(f"the recipe as it is: {three_digits(own.samples_per_s)} samples/s ({gain:+.0%} with 1){fits}")
    text += [f"{what}: {gain:+.0%}" if abs(gain) >= _NOTABLE else f"{what}: no gain" for what, gain in more]
    changed = changed_lines(config, best.arrangement)
    launcher = [] if len(devices.nodes) == 1 or config.launcher == "ray" else ["launcher=ray"]
    if not changed and not launcher:
        return [*text, "", "nothing to change"]
    settings = {word.partition("=")[0]: word for word in (*given, *changed, *launcher)}  # the last of a name counts
    return [
        *text,
        "",
        " \\\n    ".join([f"polyrhythm train {shlex.quote(recipe)}", *map(shlex.quote, settings.values())]),
    ]


def _row(one: RankedPlacement) -> dict[str, str]:
    arrangement, found = one.arrangement, one.prediction
    largest = max((size for name, size in found.memory.items() if name != "host"), default=0)
    return {
        "rate": three_digits(found.samples_per_s),
        "busy %": "/".join(f"{found.busy.get(kind, 0.0):.0%}".rstrip("%") for kind in _BUSY),
        "GB": f"{largest / 1e9:.3g}",
        "lag": f"{found.lag_mean:.2f}/{found.lag_max}",
        "sim": f"{arrangement.simulators} {devices_text(arrangement.simulator_devices)}",
        "gen": f"{arrangement.generators} {devices_text(arrangement.generator_devices)}",
        "train": devices_text(arrangement.trainer_devices),
        "sharing": arrangement.sharing,
        "rows": f"{arrangement.env_batches}x{arrangement.rows}" + f"/{arrangement.slots}" * (arrangement.slots > 1),
        "pass": str(arrangement.max_rows or "all"),
        "micro": str(arrangement.micro_batch or "whole"),
    }


def as_data(
    config: RunConfig,
    profile: Profile,
    found: Sequence[RankedPlacement],
    own: Prediction | None,
    more: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """The answer as JSON data."""
    return {
        "recipe": config.name,
        "profile": {
            "recipe": profile.recipe,
            "date": profile.date,
            "machine": profile.machine.model_dump(),
            "remarks": profile.remarks(),
        },
        "placements": [{**asdict(one.prediction), "settings": changed_lines(config, one.arrangement)} for one in found],
        "own": None if own is None else asdict(own),
        "more": dict(more),
    }
