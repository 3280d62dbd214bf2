"""Measure what each station of a recipe takes on this machine, alone and together; or take what a RUN has measured.

The file is for `simulate --profile` and `plan --profile`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli import show
from polyrhythm.config.recipes import recipe_names
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.plugins.planning.profile import Profile, Work

_MINUTES = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [-h] [--json] ([--minutes M] [--out FILE] RECIPE [section.key=value ...] | RUN [--update FILE])"
    )
    names = ", ".join(recipe_names())
    parser.add_argument("recipe", metavar="RECIPE", help=f"one of {names}; the path of a YAML file; or a run's folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ")
    parser.add_argument("--minutes", type=float, metavar="M", help=f"time to measure for (default: {_MINUTES:g})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RECIPE.profile.json)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="profile that the RUN brings up to date")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(arguments: argparse.Namespace) -> int:
    profile, path = _of_run(arguments) if Path(arguments.recipe).is_dir() else _measured(arguments)
    profile.save(path)
    print(json.dumps(profile.model_dump(mode="json"), indent=2) if arguments.json else _text(profile, path))
    return 0


def _of_run(arguments: argparse.Namespace) -> tuple[Profile, Path]:
    from polyrhythm.config.load import load_config
    from polyrhythm.observe.run_folder import CONFIG_FILE, find_run
    from polyrhythm.plugins.planning.from_run import PROFILE_FILE, from_run
    from polyrhythm.plugins.planning.profile import load_profile

    folder = Path(arguments.recipe)
    if arguments.overrides or arguments.minutes is not None:
        what = "--minutes" if arguments.minutes is not None else arguments.overrides[0]
        raise ConfigError(f"profile {folder}: {what} is for a recipe, and this is a run's folder; leave it out")
    before = load_profile(arguments.update) if arguments.update is not None else None
    folder = find_run(folder)
    profile = from_run(folder, before)
    if before is not None:
        from polyrhythm.plugins.planning.measure import with_simulated_rate

        profile = with_simulated_rate(profile, load_config(folder / CONFIG_FILE))
    return profile, _writable(arguments.out or arguments.update or folder / PROFILE_FILE)


def _measured(arguments: argparse.Namespace) -> tuple[Profile, Path]:
    from polyrhythm.config.load import load_config
    from polyrhythm.plugins.planning.measure import measure

    if arguments.update is not None:
        raise ConfigError(f"--update = {arguments.update}: it takes what a run has measured; name the run's folder")
    config = load_config(arguments.recipe, arguments.overrides)
    path = _writable(arguments.out or Path(f"{config.name}.profile.json"))
    return measure(config, _MINUTES if arguments.minutes is None else arguments.minutes), path


def _writable(path: Path) -> Path:
    """ConfigError: the file cannot be written, or is there and not a profile."""
    from polyrhythm.plugins.planning.profile import load_profile

    if not path.parent.is_dir():
        raise ConfigError(f"--out = {path}: its folder is not there; make it, or name another")
    if path.exists():
        try:
            load_profile(path)
        except ConfigError as error:
            raise ConfigError(f"--out = {path}: it is there and would be overwritten ({error}); name another") from None
    return path


def _text(profile: Profile, path: Path) -> str:
    """Each station's works, what was left out, and the cluster that is simulated from it beside the run."""
    rows = [("profile", f"{path}, of {profile.recipe} on {profile.machine.cores} cores{_devices(profile)}")]
    episodes = profile.episodes
    rows.append(("episodes", f"{episodes.mean:.3g} chunk steps, at most {episodes.longest}"))
    for kind, station in profile.stations.items():
        for name, work in station.works.items():
            rows.append((f"{kind} {name}".replace("_", " "), _times(work, name)))
        if station.beside:
            factors = ", ".join(f"{factor:.2f} beside the {other}" for other, factor in station.beside.items())
            rows.append((f"{kind} is slower", f"by {factors}"))
    if profile.rate:
        rows.append(("the run", f"{profile.rate:,.0f} transitions/s"))
    rows += profile.remarks().items()
    rows += [("left out", sentence) for sentence in profile.left_out]
    return show.aligned(rows)


def _devices(profile: Profile) -> str:
    machine = profile.machine
    return f" and {machine.devices} x {machine.device}" if machine.devices else ""


def _times(work: Work, name: str) -> str:
    """The smallest and the largest amount: mean, and the slowest in a hundred."""
    from polyrhythm.plugins.planning.profile import UNITS

    unit = dict(UNITS)[name]  # type: ignore[index]
    ends = {timing.amount: timing for timing in (work.timings[0], work.timings[-1])}
    texts = []
    for amount, timing in ends.items():
        of = f"{amount:,} {unit}{'s' * (amount != 1)} " if unit else ""
        texts.append(f"{of}{1e3 * timing.mean_s:.3g} ms (p99 {1e3 * timing.p99_s:.3g})")
    return ", ".join(texts)
