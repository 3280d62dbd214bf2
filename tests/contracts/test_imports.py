"""Who may import what, as allow-lists over the sources; import-linter follows the chains."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

import polyrhythm
from polyrhythm.plugin import plugins, table

PACKAGE = Path(polyrhythm.__file__).parent
OURS = "polyrhythm."
STANDARD = frozenset(sys.stdlib_module_names) | {"__future__"}


@cache
def _nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """The imports and calls of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


def _imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions too."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module
            # `from polyrhythm.scheduler import records` imports polyrhythm.scheduler.records.
            base = PACKAGE.parent / Path(*node.module.split("."))
            for alias in node.names:
                inner = base / alias.name
                yield (
                    f"{node.module}.{alias.name}"
                    if inner.with_suffix(".py").exists() or inner.is_dir()
                    else node.module
                )


def _is_of(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a module is one of these or below one."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _files(package: str) -> list[Path]:
    """The files of a package, or one module."""
    path = PACKAGE / package
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _strangers(package: str, allowed: tuple[str, ...]) -> list[str]:
    """Imports of a package that are neither standard library, its own, nor allowed (a name or anything below it)."""
    may = (OURS + package.removesuffix(".py").replace("/", "."), *allowed)
    return [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in _files(package)
        for name in _imports(path)
        if name.partition(".")[0] not in STANDARD and not _is_of(name, may)
    ]


#: Package → what else it may import; ours begin with a dot. What plugins may import of each other they declare.
MAY_IMPORT = {
    "scheduler": "",
    "specs": "numpy tokenizers .files",
    "config": "pydantic pydantic_core yaml .conformance .errors .files .plugin .readable .sources",
    "algorithms": "torch",
    "observe": "yaml .errors .files .readable",
    "envs": "numpy pydantic gymnasium mujoco .config .conformance .env_warnings .errors .imports .specs",
    "policies": "numpy pydantic torch .conformance .errors .files .specs",
    "training": "numpy torch .algorithms .config .errors .files .plugin .policies .specs",
    "runtime": (
        "msgspec numpy torch zmq .conformance .env_warnings .errors .imports .plugin .readable .scheduler .specs"
    ),
    "stations": (
        "numpy torch .config .conformance .envs .errors .files .plugin .policies .runtime .scheduler .specs .training"
    ),
    "cli": "pydantic polyrhythm",
    "plugins/autobatch": ".plugin .scheduler",
    "plugins/simulators": (
        "OpenGL PIL gymnasium gymnasium_robotics mani_skill metaworld msgspec mujoco numpy pydantic robosuite sapien "
        "torch .checks .config "
        ".conformance .env_warnings .envs .errors .imports .plugin .specs"
    ),
    "plugins/language/text": (
        "gem gymnasium jinja2 math_verify mcp numpy pyarrow pydantic reasoning_gym tokenizers verifiers .conformance "
        ".envs .errors .imports .plugins.language .specs"
    ),
    "plugins/language/sandbox": "pydantic .errors .imports .plugins.language",
    "plugins/planning/theory.py": ".specs",
    "plugins/virtual/clustersim": "pydantic yaml .conductors .config .errors .observe .plugins .scheduler .specs",
    "plugins/workflow": "msgspec numpy torch .config .errors .plugin .plugins .runtime .scheduler .specs",
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert (PACKAGE / package).exists()
    allowed = tuple(f"polyrhythm{name}" if name[0] == "." else name for name in MAY_IMPORT[package].split())
    assert _strangers(package, allowed) == []


PLUGINS = {name: plugin for name, plugin in plugins().items() if (PACKAGE / "plugins" / name).is_dir()}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_imports_those_that_it_declares(name: str) -> None:
    """And each that it declares, so that what it needs can be read in one place."""
    files = (PACKAGE / "plugins" / name).rglob("*.py")
    found = {one.split(".")[2] for path in files for one in _imports(path) if one.startswith("polyrhythm.plugins.")}
    assert found - {name} == set(PLUGINS[name].needs)


def test_the_core_names_no_plugins_module() -> None:
    """An address of a plugin in the core would be a hidden import."""
    named = {"plugin.py", "__init__.py"}  # who looks for plugins; old addresses of what has moved
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("plugins/") and file not in named:
            words = (node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if _is_text(node))
            assert not any("polyrhythm.plugins." in word for word in words), file


def test_ranks_and_pairs_of_hosts_alone_know_torchs_distributed() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "pairs.py" and not path.is_relative_to(PACKAGE / "plugins" / "ranks"):
            assert not any(name.startswith(("torch.distributed", "torch._C")) for name in _imports(path)), path


def test_of_the_simulators_only_maniskill_computes_with_torch() -> None:
    folder = PACKAGE / "plugins" / "simulators"
    for path in sorted(folder.rglob("*.py")):
        if not path.is_relative_to(folder / "maniskill"):
            assert "torch" not in {name.partition(".")[0] for name in _imports(path)}, path


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("package", ["stations", "runtime", "plugins/workflow"])
def test_workers_know_the_schedulers_records_but_not_its_decisions(package: str) -> None:
    parts = ("records", "codec", "inference.batching", *(["settings"] if package == "plugins/workflow" else []))
    known = {f"polyrhythm.scheduler.{part}" for part in parts}  # a workflow leases its devices by the same settings
    for path in sorted((PACKAGE / package).rglob("*.py")):
        used = {name for name in _imports(path) if name.startswith("polyrhythm.scheduler")}
        assert used <= known, f"{path.relative_to(PACKAGE)} imports {sorted(used - known)}"


def test_few_modules_of_the_runtime_import_torch() -> None:
    known = {"tensors.py", "receiver.py", "device_load.py", "device_weights.py", "observed.py", "prefixes.py"}
    for path in sorted((PACKAGE / "runtime").rglob("*.py")):
        if path.name not in known:
            assert "torch" not in {name.partition(".")[0] for name in _imports(path)}, path.name


def test_sockets_are_known_where_processes_talk() -> None:
    talking = {"authentication.py", "sockets.py"}
    for path in sorted((PACKAGE / "runtime").rglob("*.py")):
        if path.name not in talking:
            assert "zmq" not in {name.partition(".")[0] for name in _imports(path)}, path.name


@pytest.mark.parametrize("name", ["memory/in_flight", "processes/incarnation"])
def test_what_a_launcher_decides_is_decided_without_io(name: str) -> None:
    pure = {"__future__", "collections", "collections.abc", "dataclasses", "heapq", "math", "signal", "typing"}
    records = {"errors", "runtime.hosts", "runtime.messages", "runtime.spans", "scheduler.records"}
    forms = {
        "runtime.memory.arena",
        "runtime.transport.drops",
        "runtime.transport.wire",
    }
    for found in _imports(PACKAGE / "runtime" / f"{name}.py"):
        assert found in pure or found.removeprefix("polyrhythm.") in records | forms, found


def test_channels_decide_without_io() -> None:
    for found in _imports(PACKAGE / "plugins" / "workflow" / "exchange.py"):
        assert found == "polyrhythm.plugins.workflow.protocol" or found.partition(".")[0] in STANDARD - {
            "time",
            "threading",
        }


def _last(called: ast.expr) -> str:
    """The last part of the dotted name of what is called, which `ast.unparse` would take long to say."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _calls(name: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Where a function of this dotted name is called in the sources, with its constant keyword arguments."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in _nodes(path):
            if isinstance(node, ast.Call) and name.endswith(_last(node.func)) and ast.unparse(node.func) == name:
                words = {word.arg or "": getattr(word.value, "value", None) for word in node.keywords}
                yield str(path.relative_to(PACKAGE)), words


def test_nothing_that_is_read_is_executed() -> None:
    """Neither messages nor files are pickles."""
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    importing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if unsafe & {name.partition(".")[0] for name in _imports(path)}
    }
    assert not importing
    loads = list(_calls("torch.load"))
    assert loads
    assert all(words.get("weights_only") is True for _, words in loads), loads
    assert all(not words.get("allow_pickle", False) for _, words in _calls("np.load"))


def _modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_simulators_process_holds_no_torch() -> None:
    statements = (
        "import polyrhythm.stations.simulator.station",
        "import polyrhythm.plugins.join.command, polyrhythm.plugins.join.joiner",
        "import polyrhythm.runtime.processes.child",
        "import polyrhythm.runtime.local",
        "import polyrhythm.plugins.virtual.clustersim",
        "import polyrhythm.envs.base",
        "import polyrhythm.plugins.workflow, polyrhythm.plugins.workflow.station",
    )
    assert not {"torch", "transformers"} & _modules_after("\n".join(statements)), "one process, for all of them"


def test_a_simulator_at_work_holds_neither_torch_nor_the_main_process() -> None:
    modules = _modules_after(
        "import polyrhythm.runtime.processes.child\nfrom polyrhythm.runtime.factories import unpack\n"
        "from polyrhythm.stations.simulator.station import SimulatorFactory\n"
        "from polyrhythm.config.registry import resolve\n"
        "for env in ({'type': 'latency'}, {'type': 'gymnasium', 'id': 'CartPole-v1'}):\n"
        "    resolve('env', env).build(2)"
    )
    assert not {"torch", "transformers", "tensorboard", "yaml", "psutil"} & modules
    assert not any(name.startswith(("polyrhythm.pipeline", "polyrhythm.training")) for name in modules)
    assert "polyrhythm.scheduler.conductor" not in modules


def test_the_scheduler_pulls_in_nothing_of_ours_or_of_others() -> None:
    words = "import polyrhythm.scheduler.conductor\nfrom polyrhythm.plugin import load_all\nload_all('scheduler')"
    modules = {name.partition(".")[0] for name in _modules_after(words)}
    assert not modules & {"numpy", "torch", "pydantic", "yaml"}


def test_what_plugins_add_to_the_scheduler_decides_without_io() -> None:
    """Their modules, and what these import of their plugin, know the scheduler alone."""
    waiting, known = [address.partition(":")[0] for address in table("scheduler").values()], set[str]()
    assert waiting
    while waiting:
        name = waiting.pop()
        if name in known or name.startswith("polyrhythm.scheduler"):
            continue
        known.add(name)
        assert name.startswith("polyrhythm.plugins."), f"{name}, of {sorted(known)}"
        found = set(_imports(PACKAGE.parent / f"{name.replace('.', '/')}.py"))
        assert not found & {"threading", "time", "socket", "os", "pathlib"}, name
        waiting += [one for one in found if one.partition(".")[0] not in STANDARD]


#: The scheduler's two halves, and what both may know.
TICKETS = ("rollout", "samples", "updates")
SERVING = ("inference",)
COMMON = ("codec", "records", "settings", "versions")


def _scheduler_imports(part: str) -> Iterator[tuple[str, str]]:
    """(file, part of the scheduler that it imports) over the files of one part, a package or a module."""
    root = PACKAGE / "scheduler"
    for path in [root / f"{part}.py"] if (root / f"{part}.py").exists() else sorted((root / part).rglob("*.py")):
        for name in _imports(path):
            if name.startswith("polyrhythm.scheduler."):
                yield str(path.relative_to(root)), name.split(".")[2]


@pytest.mark.parametrize(
    ("part", "allowed"),
    [
        *((part, (*COMMON, *TICKETS)) for part in TICKETS),
        *((part, (*COMMON, *SERVING)) for part in SERVING),
        *((part, COMMON) for part in COMMON),
        ("samples", (*COMMON, "samples")),
    ],
)
def test_neither_half_of_the_scheduler_imports_the_other(part: str, allowed: tuple[str, ...]) -> None:
    found = list(_scheduler_imports(part))
    assert found or part in COMMON
    assert [(file, other) for file, other in found if other not in allowed] == []


def test_every_part_of_the_scheduler_belongs_to_a_half_or_joins_them() -> None:
    parts = {path.stem for path in (PACKAGE / "scheduler").iterdir() if path.name[0] not in "_."}
    assert parts == {*TICKETS, *SERVING, *COMMON, "conductor"}


def test_the_allow_lists_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import torch.nn\ndef f():\n    from polyrhythm.scheduler import records\n"
        "from polyrhythm.scheduler import Conductor\n"
    )
    assert set(_imports(file)) == {"torch.nn", "polyrhythm.scheduler.records", "polyrhythm.scheduler"}


def test_a_run_without_extras_needs_none_of_their_packages() -> None:
    """CartPole's run is imported and checked as where only the base dependencies are installed."""
    absent = ("safetensors", "transformers", "tokenizers", "peft", "metaworld", "mujoco", "ray", "vllm")
    words = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import polyrhythm.pipeline.train\n"
        "from polyrhythm.config.load import load_config\n"
        "from polyrhythm.pipeline.validation.check import validate_run\n"
        "validate_run(load_config('cartpole'))\n"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
