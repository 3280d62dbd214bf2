"""Measure a part of the system against a reference. Minutes are on two cores.

conductor   CPU time of the conductor per request, by number of slots
ceiling     CPU time of the main process per chunk step, with stations that compute nothing, by number of env batches;
            its sockets and descriptors (10 minutes)
roundtrip   time from an observation to its action through processes
throughput  whole runs beside a plain loop; memory of sixteen simulators
weights     time of a version from one process to another by every way of this machine, beside bare copies; the pause
            of a generator that serves meanwhile (2 minutes)
hosts       observations, samples and weights over a link to another host, beside a bare tcp socket and, with --ray,
            beside Ray; the main process with env batches on 3 nodes (4 minutes)
switch      time in which a station leaves a leased device and comes back, beside bare copies (half a minute)
update      one update of the learner beside a plain torch loop
ranks       one update on several ranks beside plain DDP and FSDP2; memory of each rank (4 minutes)
policies    the published VLA policies beside plain forward passes with transformers: acting, a training micro-batch,
            weights; on a CPU the small sizes alone (4 minutes; needs the vla extra)
gpu         the campaign on a rented GPU, each figure kept when it is measured: its tests, the quickstart,
            gpu-colocated, policies at full size, an update of a language model (--minutes 12; --tiny: any machine)
gpu-colocated  full-size random pi0 with Meta-World and training on one GPU, lock-step and three kinds of asynchrony
            (8 minutes; --tiny: any machine, 4 minutes; needs the vla and metaworld extras)
envs        environments that are installed: step, observation, reset, memory per row, throughput by rows, threads and
            processes, our adapters beside the bare simulators, resets ahead (1 to 4 minutes for each)
metaworld   the quickstart in lock-step and with each kind of asynchrony: seconds per version (10 minutes; needs the
            metaworld extra)
learning    lock-step against full asynchrony: areas under learning curves, and time to the same success where every
            stage sleeps (20 minutes; the tasks drawer and reach need the metaworld extra)
algorithms  every policy loss under growing staleness, and on tasks of their own advantages of groups and sampling
            methods of a flow policy: areas under learning curves (an hour and a half; the task drawer needs the
            metaworld extra, chains the vla extra)
overlap     stages that sleep, in four modes, beside the limit; CPU time per transition. NAME=VALUE words change the
            scene: env_batches rows simulators generators sim_latency infer_latency train_latency episode_steps max_lag
            seed
fidelity    ten such scenes, live and simulated (a quarter of an hour)
batching    batching auto beside the best fixed batching of a grid, simulated (half an hour)
placement   placements of the RL-VLA3 paper, scaled, on devices that are locks: processes that sleep, beside the
            simulated cluster and the paper's ranking (40 minutes)
papers      rows of RL-VLA3, ROLL Flash, verl and our H200 beside the simulated cluster (half a minute)
moves       placement.moves beside two fixed operations while costs change by 3, in the simulated cluster and, without
            --tiny, in processes that sleep on devices that are locks (1 minute, and 10 a turn)
streamer    basic and streamer training: figure 9 of the RL-VLA3 paper, simulated, and a small live run of stages that
            sleep (a quarter of an hour)
language    with engines that sleep, beside the simulated cluster: batch rollout, queue scheduling, prompt replication
            and asynchronous training with published costs (plain, filtered), the recipe's lengths and costs (recipe),
            and its costs with a long tail (native); figure_7 figure_8 figure_9 figure_11 table_1_rollout_size
            table_1_length of the ROLL Flash paper (2 minutes a part and turn); scaled_base scaled_think: its figure
            1b, 16 to 128 GPUs simulated, 128 live too (15 minutes, and 5 a turn); engines: those that compute beside
            bare vLLM, `generate` and transformers' continuous batching (5 minutes; needs the vla extra; vLLM where it
            is installed); only on request: require_batches, verl's ablation on quickstart_lm, --repeats seeds and 10 x
            --versions versions (half an hour); --tiny: one small scene in three modes (a minute)
scale       8 to 1,024 GPUs, simulated: the placements of the RL-VLA3 paper, links between hosts, the conductor's CPU
            (--event: of `bench conductor` or `bench ceiling`): what bounds first (10 minutes)
peers       Sample Factory, TorchRL, Stable-Baselines3 and a plain loop on the workloads of overlap and throughput;
            makes an environment for each, which takes a package index and 5 GB (40 minutes)
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.cli import show
from polyrhythm.cli.arguments import count, positive
from polyrhythm.errors import nearest

#: Parts of `learning`: the time to the same success, and tasks whose curves are compared; the last two only on request.
PARTS = ("wall_clock", "cartpole", "drawer", "reach", "quickstart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=_benchmark, metavar="NAME", help=f"what to measure: {', '.join(NAMES)}")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="overlap: the scene, such as rows=4")
    parser.add_argument("--counts", type=_counts, metavar="N,N", help="ranks: numbers of ranks (1,2; 4 if cores allow)")
    parser.add_argument("--slots", type=_counts, metavar="N,N", help="conductor: numbers of slots")
    parser.add_argument("--generators", type=_counts, metavar="N,N", help="conductor: numbers of generators")
    parser.add_argument("--rows", type=_counts, metavar="N,N", help="throughput: numbers of rows; policies: of a pass")
    parser.add_argument(
        "--env-batches", type=_counts, metavar="N,N", help="ceiling: numbers of env batches; hosts: of each node"
    )
    parser.add_argument("--processes", type=_counts, metavar="N,N", help="ceiling: numbers of simulator processes")
    parser.add_argument("--seconds", type=positive, metavar="S", help="ceiling, hosts: length of a turn (5)")
    parser.add_argument("--steps", type=count, metavar="N", help="roundtrip: round trips of a turn; envs: timed steps")
    parser.add_argument("--megabytes", type=count, metavar="N", help="weights, switch, hosts: size of the model")
    parser.add_argument(
        "--versions",
        type=count,
        metavar="N",
        help="versions of a turn (metaworld, language, streamer: 6; overlap: 12; fidelity: 8)",
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="seeds of each curve (learning: 8; algorithms: 5)")
    parser.add_argument(
        "--tasks",
        type=_names,
        metavar="NAME,NAME",
        help=f"learning: some of {', '.join(PARTS)} (all but the last two); algorithms: some of "
        f"{', '.join(PARTS[1:3])}, chains, spot",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        metavar="N",
        help="interleaved turns (5; update, ranks, policies, weights, switch: 7; ceiling, metaworld, overlap, "
        "fidelity, placement, peers, envs, language, streamer: 3), seeds of learning's wall_clock and of batching (3)",
    )
    parser.add_argument(
        "--only",
        type=_names,
        metavar="NAME,NAME",
        help="peers: these, and the plain loop; algorithms: these objectives; placement: these setups; "
        "envs: these environments; fidelity: these settings; gpu, language: these parts; gpu-colocated: these rows",
    )
    parser.add_argument(
        "--pythons",
        type=_pairs,
        metavar="TYPE=PYTHON,TYPE=PYTHON",
        help="envs: a Python of its own for a type (a path, or a name of `polyrhythm envs setup`)",
    )
    parser.add_argument("--types", type=_names, metavar="NAME,NAME", help="policies: some of the four architectures")
    parser.add_argument("--sizes", type=_names, metavar="NAME,NAME", help="policies: tiny, released (both on a GPU)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="policies: where; cuda where there is one")
    tiny = "gpu, gpu-colocated: small, on the CPU; language: one small scene, to try it; moves: simulated alone"
    parser.add_argument("--tiny", action="store_true", default=None, help=tiny)
    parser.add_argument("--minutes", type=positive, metavar="M", help="gpu, gpu-colocated: of all parts (12, 8)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="results of what is finished, which is not repeated: gpu (runs/gpu), gpu-colocated (runs/gpu-colocated); "
        "policies, weights, switch, learning, algorithms (none are kept)",
    )
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="peers: where theirs are, or are made")
    parser.add_argument("--ray", type=Path, metavar="PYTHON", help="hosts: a Python that has Ray (none)")
    parser.add_argument("--gpus", type=_counts, metavar="N,N", help="scale: numbers of GPUs")
    parser.add_argument("--event", metavar="COST", help="scale: CPU of the conductor for an event (25us)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    benchmark = _BENCHMARKS[arguments.name]
    given = {name: value for name, value in vars(arguments).items() if name not in ("name", "json")}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    _check_options(arguments.name, given, inspect.signature(benchmark).parameters)
    result = benchmark(**given)
    print(json.dumps(result, indent=2) if arguments.json else words(result))
    return 1 if result.get("failed") else 0


def _check_options(benchmark: str, given: Mapping[str, Any], takes: Iterable[str]) -> None:
    """Raise ConfigError if a given option is not one of the benchmark's."""
    from polyrhythm.errors import ConfigError

    options = [f"--{name.replace('_', '-')}" for name in takes if name != "settings"] + ["--json"]
    for name in given:
        if name == "settings" and name not in takes:
            said = " ".join(given[name])
            raise ConfigError(f"{said}: bench {benchmark} has no scene to change; leave it out")
        if name not in takes:
            option, known = name.replace("_", "-"), ", ".join(options)
            raise ConfigError(f"--{option}: bench {benchmark} has no such option, only {known}; leave it out")


def words(result: dict[str, Any]) -> str:
    """The result as text: a line for each plain entry, then a table of its `modes`, if any.

    An entry that is a list of records becomes a separate table. Each of its `parts` follows under its name. Lists of
    lists (curves) are left out.
    """
    tables = {name: value for name, value in result.items() if _is_table(value)}
    plain = {name: value for name, value in result.items() if name not in ("modes", "parts", *tables)}
    said = [show.lines(plain)] if plain else []
    said += [f"{name}\n{show.records(value)}" for name, value in tables.items()]
    if "modes" in result:
        said.append(show.table({name: _without_curves(mode) for name, mode in result["modes"].items()}))
    said += [f"{name}\n\n{words(part)}" for name, part in result.get("parts", {}).items()]
    return "\n\n".join(said)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(record, dict) for record in value)


def _without_curves(mode: dict[str, Any]) -> dict[str, Any]:
    nested = {name for name, value in mode.items() if isinstance(value, list) and value and isinstance(value[0], list)}
    return {name: value for name, value in mode.items() if name not in nested}


# The parameters of each are the options that it takes.


def _conductor(
    slots: Sequence[int] = (16, 64, 256, 1024, 4096), generators: Sequence[int] = (1, 4, 16, 64)
) -> dict[str, Any]:
    from polyrhythm_bench.cases import conductor as bench_conductor

    return bench_conductor.run(slots, generators)


def _ceiling(
    env_batches: Sequence[int] = (16, 64, 256, 1024, 2048, 4096),
    processes: Sequence[int] = (2, 8),
    seconds: float = 5.0,
    repeats: int = 3,
) -> dict[str, Any]:
    from polyrhythm_bench.cases import ceiling

    return ceiling.run(env_batches, processes, seconds, repeats)


def _roundtrip(steps: int = 1000, repeats: int = 5) -> dict[str, Any]:
    from polyrhythm_bench.cases import roundtrip

    return roundtrip.run(steps, repeats)


def _throughput(rows: Sequence[int] = (16, 256), repeats: int = 5) -> dict[str, Any]:
    from polyrhythm_bench.cases import throughput

    return throughput.run(rows, repeats=repeats)


def _weights(megabytes: int = 500, repeats: int = 7, out: Path | None = None) -> dict[str, Any]:
    from polyrhythm_bench.cases import weights

    return weights.run(megabytes, repeats, out)


def _hosts(
    env_batches: Sequence[int] = (10, 100, 1000),
    seconds: float = 5.0,
    megabytes: int = 100,
    repeats: int = 5,
    ray: Path | None = None,
) -> dict[str, Any]:
    from polyrhythm.errors import ConfigError
    from polyrhythm_bench.cases import hosts

    if ray is not None and not ray.is_file():
        raise ConfigError(f"--ray {ray}: there is no such Python; name one with Ray, such as venv/bin/python")
    return hosts.run(repeats, megabytes, env_batches=env_batches, seconds=seconds, ray=ray)


def _switch(megabytes: int = 500, repeats: int = 7, out: Path | None = None) -> dict[str, Any]:
    from polyrhythm_bench.cases import switch

    return switch.run(megabytes, repeats, out)


def _moves(versions: int = 40, repeats: int = 1, tiny: bool = False) -> dict[str, Any]:
    from polyrhythm_bench.cases import moves

    return moves.run(versions, repeats, tiny=tiny)


def _metaworld(versions: int = 6, repeats: int = 3) -> dict[str, Any]:
    from polyrhythm_bench.cases import metaworld

    return metaworld.run(versions, repeats)


def _update(repeats: int = 7) -> dict[str, Any]:
    from polyrhythm_bench.cases import update

    return update.run(repeats)


def _ranks(counts: Sequence[int] = (), repeats: int = 7) -> dict[str, Any]:
    from polyrhythm.imports import count_cores
    from polyrhythm_bench.cases import ranks

    return ranks.run(tuple(counts) or ((1, 2, 4) if count_cores() >= 4 else (1, 2)), repeats)


def _policies(
    types: Sequence[str] = (),
    sizes: Sequence[str] = (),
    rows: Sequence[int] = (1, 8, 32, 64),
    repeats: int = 7,
    device: str = "",
    out: Path | None = None,
) -> dict[str, Any]:
    check_packages()
    from polyrhythm_bench.cases import policies

    _check_names("--types", types, policies.TYPES)
    _check_names("--sizes", sizes, policies.SIZES)
    return policies.run(types or policies.TYPES, sizes or policies.SIZES, rows, repeats, device, out)


def _gpu_colocated(
    tiny: bool = False, minutes: float = 8.0, out: Path | None = None, only: Sequence[str] = ()
) -> dict[str, Any]:
    check_packages()
    from polyrhythm_bench.cases import gpu_colocated
    from polyrhythm_bench.workloads import colocated

    _check_names("--only", only, tuple(colocated.rows_of(colocated.scene_of(tiny=tiny))))
    folder = out or Path("runs", "gpu-colocated-tiny" if tiny else "gpu-colocated")
    return gpu_colocated.run(folder, minutes, tiny=tiny, only=only)


def _gpu(
    minutes: float = 12.0, tiny: bool = False, out: Path | None = None, only: Sequence[str] = ()
) -> dict[str, Any]:
    from polyrhythm_bench.cases import gpu

    folder = out or Path("runs", "gpu-tiny" if tiny else "gpu")
    _check_names("--only", only, [part.name for part in gpu.parts(folder, tiny=tiny)])
    return gpu.run(folder, minutes, tiny=tiny, only=only)


def _learning(
    tasks: Sequence[str] = PARTS[:-2], seeds: int = 8, repeats: int = 3, out: Path | None = None
) -> dict[str, Any]:
    from polyrhythm_bench.cases import learning, wall_clock
    from polyrhythm_bench.harness import trainings

    _check_names("--tasks", tasks, PARTS)
    chosen = {name: task for name, task in learning.TASKS.items() if name in tasks}
    trainings.check_tasks(chosen, learning.MODES)
    found = {"wall_clock": wall_clock.run(repeats)} if "wall_clock" in tasks else {}
    return {"parts": found | (learning.run(chosen, seeds, out) if chosen else {})}


def _algorithms(
    tasks: Sequence[str] = (), seeds: int = 5, only: Sequence[str] = (), out: Path | None = None
) -> dict[str, Any]:
    from polyrhythm_bench.cases import algorithms

    _check_names("--tasks", tasks, tuple(algorithms.TASKS))
    _check_names("--only", only, tuple(algorithms.OBJECTIVES))
    chosen = {name: algorithms.TASKS[name] for name in tasks or algorithms.TASKS}
    return {"parts": algorithms.run(chosen, seeds, only, folder=out)}


def check_packages(packages: Sequence[str] = ("transformers", "safetensors")) -> None:
    """Raise ConfigError if one of the packages of the vla extra is missing."""
    from polyrhythm.config.catalog import need
    from polyrhythm.errors import ConfigError, pip_install

    for package in packages:
        if not need(package).found:
            install = pip_install("'polyrhythm[vla]'")
            raise ConfigError(f"the package {package} is not installed; run: {install}")


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError if one of the names is not known."""
    from polyrhythm.errors import ConfigError

    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name}: it is not one of {', '.join(known)}")


def _envs(
    only: Sequence[str] = (), steps: int = 500, repeats: int = 3, pythons: Mapping[str, str] | None = None
) -> dict[str, Any]:
    from polyrhythm_bench.cases import envs

    _check_names("--only", only, tuple(envs.CASES))
    _check_names("--pythons", tuple(pythons or ()), tuple({case.env["type"]: None for case in envs.CASES.values()}))
    return envs.run(only, steps, repeats, pythons)


def _overlap(settings: Sequence[str] = (), versions: int = 12, repeats: int = 3) -> dict[str, Any]:
    from polyrhythm_bench.cases import overlap
    from polyrhythm_bench.workloads.scene import parse_scene

    return overlap.run(parse_scene(settings), versions, repeats)


def _fidelity(versions: int = 8, repeats: int = 3, only: Sequence[str] = ()) -> dict[str, Any]:
    from polyrhythm_bench.cases import fidelity

    return fidelity.run(versions, repeats, only)


def _batching(repeats: int = 3) -> dict[str, Any]:
    from polyrhythm_bench.cases import batching

    return batching.run(repeats)


def _placement(only: Sequence[str] = (), repeats: int = 3) -> dict[str, Any]:
    from polyrhythm_bench.cases import placement
    from polyrhythm_bench.workloads.placement_scene import SETUPS

    _check_names("--only", only, SETUPS)
    return placement.run(only or SETUPS, repeats)


def _papers() -> dict[str, Any]:
    from polyrhythm_bench import papers

    return papers.run()


def _streamer(repeats: int = 3, versions: int = 6) -> dict[str, Any]:
    from polyrhythm_bench.cases import streamer

    return streamer.run(repeats, versions)


def _language(
    only: Sequence[str] = (), versions: int | None = None, repeats: int | None = None, tiny: bool = False
) -> dict[str, Any]:
    from polyrhythm_bench.cases import language

    if tiny and (only or versions or repeats):
        from polyrhythm.errors import ConfigError

        raise ConfigError("--tiny: bench language then has one scene, once; leave out --only, --versions and --repeats")
    if tiny:
        return language.run_tiny()
    _check_names("--only", only, (*language.PARTS, *language.ON_REQUEST))
    if not only or "engines" in only:
        check_packages()
    return language.run(only or language.PARTS, versions or 6, repeats or 3)


def _scale(gpus: Sequence[int] = (8, 64, 256, 1024), event: str = "25us") -> dict[str, Any]:
    from polyrhythm_bench.papers import links

    for number in gpus:
        if number % links.GPUS_PER_HOST:
            from polyrhythm.errors import ConfigError

            raise ConfigError(f"--gpus {number}: hosts have {links.GPUS_PER_HOST} GPUs; write a multiple of it")
    return links.run(gpus, event)


def _peers(repeats: int = 3, only: Sequence[str] = (), environments: Path | None = None) -> dict[str, Any]:
    from polyrhythm_bench.peers import run as peers

    return peers.run(repeats, environments, only=only)


_BENCHMARKS: dict[str, Callable[..., dict[str, Any]]] = {
    "conductor": _conductor,
    "ceiling": _ceiling,
    "roundtrip": _roundtrip,
    "throughput": _throughput,
    "weights": _weights,
    "hosts": _hosts,
    "switch": _switch,
    "update": _update,
    "ranks": _ranks,
    "policies": _policies,
    "gpu": _gpu,
    "gpu-colocated": _gpu_colocated,
    "envs": _envs,
    "metaworld": _metaworld,
    "learning": _learning,
    "algorithms": _algorithms,
    "overlap": _overlap,
    "fidelity": _fidelity,
    "batching": _batching,
    "placement": _placement,
    "moves": _moves,
    "papers": _papers,
    "streamer": _streamer,
    "language": _language,
    "scale": _scale,
    "peers": _peers,
}
NAMES = tuple(_BENCHMARKS)


def _benchmark(text: str) -> str:
    if text not in NAMES:
        listed = f"they are {', '.join(NAMES)}"
        raise argparse.ArgumentTypeError(f"no such benchmark: {text}; {nearest(text, NAMES)}{listed}")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, _, value in pairs:
        if not (name and value):
            raise argparse.ArgumentTypeError(f"{text}: write TYPE=PYTHON, such as robosuite=robosuite")
    return {name: value for name, _, value in pairs}


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))
