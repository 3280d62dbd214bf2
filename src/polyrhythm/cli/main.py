"""Runs one command of the command line and returns its exit status.

Status 0: done; 1: a check failed; 2: an error that the user can fix, printed on stderr, a line for each problem; 3:
with `train --check`, something is missing on this machine and nothing is wrong; 130, 143, 129: ended by SIGINT
(Ctrl-C), SIGTERM, SIGHUP.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from polyrhythm import __version__
from polyrhythm.error_codes import COMMAND_LINE, code_of
from polyrhythm.errors import LISTED, ConfigError, EnvLost, PolyrhythmError, nearest, pip_install
from polyrhythm.files import trouble
from polyrhythm.imports import keep_freed_memory
from polyrhythm.pipeline.signals import Interrupts, SignalInterrupt, exit_status
from polyrhythm.plugin import import_address, load, plugins
from polyrhythm.readable import set_up_logging, visible

#: Command of the core → its purpose. Its module is polyrhythm.cli.<command>; plugins add more commands.
CORE = {
    "train": "train a policy with a recipe",
    "resume": "resume a run, or extend a finished one",
    "eval": "evaluate a trained policy on held-out seeds",
    "export": "write a run's policy as a folder of safetensors",
    "envs": "list the environments, and what each needs",
    "policies": "list the policies, and what each needs",
}

#: Commands of the distribution polyrhythm-bench.
_BENCH = {
    "bench": ("polyrhythm_bench.cli.bench", "measure a part of the system"),
    "chaos": ("polyrhythm_bench.cli.chaos", "run a recipe while its processes are killed, stopped and slowed"),
}


class CommandModule(Protocol):
    """Interface of a command: a module, or a class; its docstring is the help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def entry() -> None:
    """Entry point of the installed script `polyrhythm`."""
    sys.exit(main(sys.argv[1:]))


def main(words: Sequence[str]) -> int:
    # Lets a user's `module:Class` be found in the working folder, as with `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.append(os.getcwd())  # noqa: PTH109
    # Must precede the import of torch: small models on shared cores are up to ten times slower with more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    keep_freed_memory()
    set_up_logging()
    try:
        with Interrupts().handle_signals():  # SIGTERM then also runs cleanup code
            status = _dispatch(words)
        sys.stdout.flush()
        return status
    except (PolyrhythmError, EnvLost) as error:
        _print_error(_message(error), error)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "polyrhythm").partition(".")[0] in ("polyrhythm", "polyrhythm_bench"):
            raise
        command = pip_install(error.name or "")
        _print_error(f"error: {code_of(error)}: the package {error.name} is not installed; run: {command}", error)
        return 2
    except KeyboardInterrupt as error:
        _print_error("interrupted", error)
        return error.status if isinstance(error, SignalInterrupt) else exit_status(signal.SIGINT)
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 0
    except OSError as error:
        if not (sentence := trouble(error)):
            raise
        _print_error(f"error: {code_of(error)}: {sentence}", error)
        return 2


def _message(error: PolyrhythmError | EnvLost) -> str:
    """The error with its code in one line; several problems of the settings have a line and a code each."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        head, *lines = str(error).split("\n  ")
        coded = [f"{code}: {line}" for code, line in zip(error.codes, lines[:LISTED], strict=False)]
        return "\n  ".join([f"error: {head}", *coded, *lines[LISTED:]])
    lost = "; with launcher=local its simulator would be replaced" if isinstance(error, EnvLost) else ""
    return f"error: {code_of(error)}: {' '.join(str(error).split())}{lost}"


def _print_error(what: str, error: BaseException) -> None:
    lines = [f"polyrhythm: {what}", *getattr(error, "__notes__", ())]
    print(*map(visible, lines), sep="\n", file=sys.stderr)


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has closed it, as `head` does; if so, redirect further output to /dev/null."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # no event mask: errors are always reported
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _dispatch(words: Sequence[str]) -> int:
    command, rest = split_command(words)
    known = commands()
    if command not in known:
        if command and not command.startswith("-"):
            listed = ", ".join(known)
            _top_parser().error(f"no such command: {command}; {nearest(command, known)}commands are {listed}")
        _top_parser().parse_args(words or ["--help"])
        raise AssertionError("argparse accepts no unknown command")
    module, parser = command_parser(command)
    arguments, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        hint = _settings_hint(unknown[0]) if hasattr(arguments, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return module.run(arguments)


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command of a command line (one word, or two as in `eval compare`), and the words that follow it."""
    size = 2 if " ".join(words[:2]) in commands() else 1
    return " ".join(words[:size]), list(words[size:])


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have their code."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{COMMAND_LINE}: {message}")


def command_parser(command: str) -> tuple[CommandModule, argparse.ArgumentParser]:
    """A command of `commands()` and the parser of its arguments."""
    module = _load(command)
    parser = _Parser(
        prog=f"polyrhythm {command}",
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return module, parser


def commands() -> dict[str, str]:
    """Purpose of each command, including those of plugins; `envs NAME` and `policies NAME` belong to those two."""
    purposes = [item for plugin in plugins().values() for item in plugin.purposes.items()]
    added = {name: purpose for name, purpose in purposes if " " not in name or name.startswith("eval ")}
    return {**CORE, **added, **{name: purpose for name, (_, purpose) in _BENCH.items()}}


def _load(command: str) -> CommandModule:
    """Import a command. ConfigError: it is one of polyrhythm-bench, which is not installed."""
    if command in _BENCH and importlib.util.find_spec("polyrhythm_bench") is None:
        raise ConfigError(
            f"polyrhythm {command}: the distribution polyrhythm-bench is not installed; in a checkout of Polyrhythm "
            f"run: {pip_install('-e bench')}"
        )
    found: CommandModule
    if command in CORE:
        found = import_address(f"polyrhythm.cli.{'evaluate' if command == 'eval' else command}")
    else:
        found = import_address(_BENCH[command][0]) if command in _BENCH else load("command", command)
    return found


def _settings_hint(option: str) -> str:
    """Hint for a setting that was given as an option: `--versions` is written training.versions=…"""
    from polyrhythm.config.explain import paths_to
    from polyrhythm.config.schema import RunConfig

    key = option.lstrip("-").partition("=")[0].replace("-", "_")
    parts = key.split(".")
    paths = [path for path in paths_to(parts[-1], RunConfig) if path.endswith(key)]
    meant = f"; did you mean {' or '.join(f'{path}=VALUE' for path in paths[:3])}?" if paths else ""
    return f"{meant or ';'} settings are written section.key=value"


def _top_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="polyrhythm",
        description="Asynchronous RL post-training of robot policies.",
        epilog="Errors have a code, such as PR101: `polyrhythm explain PR101` prints its cause and what to do.",
    )
    parser.add_argument("--version", action="version", version=f"polyrhythm {__version__}")
    added = parser.add_subparsers(metavar="command", required=True)
    for command, purpose in commands().items():
        added.add_parser(command, help=purpose, add_help=False)
    return parser
