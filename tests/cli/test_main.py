"""The command line answers fast, imports what it runs, and turns outcomes into exit statuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.cli import main as cli
from polyrhythm.cli.main import commands, main
from polyrhythm.config.load import load_config, merge, save_config
from polyrhythm.errors import RunHalted

HEAVY = ("torch", "ray", "numpy", "pydantic", "tensorboard", "gymnasium")
PROBE = f"""
import sys
from polyrhythm.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print([name for name in {HEAVY!r} if name in sys.modules], status)
"""


def _python(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    source = str(Path(cli.__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("words", [["--help"], *([command, "--help"] for command in commands())])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    done = _python("-c", PROBE, *words)
    assert done.stdout.endswith("[] 0\n"), done.stdout + done.stderr
    assert "usage: polyrhythm" in done.stdout


def test_help_is_quick() -> None:
    """Processor time, best of three, so that a busy machine does not decide; people wait for it, hence the limit."""
    times = []
    for _ in range(3):
        before = _cpu_s_of_children()
        assert _python("-m", "polyrhythm", "train", "--help").returncode == 0
        times.append(_cpu_s_of_children() - before)
    assert min(times) < 0.5


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_top_help_lists_every_command_and_no_words_means_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in commands())


def test_train_without_a_recipe_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ((["train"], 2), (["train", "--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == status
        told = capsys.readouterr()
        shown = " ".join((told.err or told.out).split())
        assert "recipe [section.key=value ...]" in shown
        assert "cartpole, fetch_reach_pixels, latency, libero_groot" in shown


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["trian"])
    assert end.value.code == 2
    assert "no such command: trian; did you mean train? commands are train, resume, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "cartpole", "--versions", "3"], "--versions 3; did you mean training.versions=VALUE? settings are"),
        (["check", "cartpole", "--mini-batch-samples=3"], "did you mean training.mini_batch_samples=VALUE? settings"),
        (["resume", "here", "--training.versions=3"], "did you mean training.versions=VALUE? settings are written"),
        (["train", "cartpole", "--colour"], "unrecognized arguments: --colour; settings are written section.key=value"),
        (["eval", "here", "--versions", "3"], "unrecognized arguments: --versions 3\n"),
    ],
)
def test_a_setting_that_is_given_as_an_option_says_how_it_is_written(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_several_wrong_settings_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cartpole", "seed=1.5", "rollout.rows=0", "groups.sise=2"]) == 2
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "polyrhythm: error: cartpole: 3 problems"
    assert sorted(line.partition(" = ")[0] for line in lines) == [
        "  PR101: groups.sise",
        "  PR104: rollout.rows",
        "  PR104: seed",
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "cartpol"], "did you mean cartpole?"),
        (["train", "quickstart", "training.version=3"], "did you mean versions?"),
        (["train", "quickstart", "freshness.on_update=abort"], "use continue"),
        (["eval", "nowhere"], "is not there"),
        (["train", "cartpole", "out_dir=/proc/x"], "out_dir"),
        (["train", "cartpole", "resume=nowhere"], "it is not there; name another, or set resume=never"),
        (["train", "cartpole", "training.mini_batch_samples=10000000000"], "shared memory: "),
        (["simulate", "nowhere.yaml"], "does not exist; name a YAML description of a cluster, or a shipped one: "),
        (["train", "cartpole", "training.versions="], "no value after =; write one, null for none, or "),
    ],
)
def test_a_users_error_is_one_line_and_status_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("polyrhythm: error: ")
    assert told.err.count("\n") == 1
    assert part in told.err


def test_a_refused_config_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "seed=-1"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_used_out_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["train", "quickstart", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (RunHalted("two\nlines"), 2)])
def test_exit_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert main(["train"]) == status


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("8", "8")])
def test_threads_default_to_one_and_are_the_users_choice(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    main(["train", "cartpol"])
    assert os.environ["OMP_NUM_THREADS"] == used


@pytest.mark.parametrize("name", ["metaworld.env_dict", "polyrhythm.nothing"])
def test_a_missing_package_is_named_and_a_module_of_ours_is_a_bug(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: object) -> int:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(cli, "_dispatch", fail)
    if name.startswith("polyrhythm"):
        with pytest.raises(ModuleNotFoundError):
            main(["train"])
    else:
        assert main(["train"]) == 2
        assert f"the package {name} is not installed" in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_termination_ends_a_command_as_ctrl_c_does(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def work(words: object) -> int:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)
        return 0

    before = signal.getsignal(number)
    if before == signal.SIG_IGN:
        pytest.skip("whoever started the tests has this signal ignored, as nohup does")
    monkeypatch.setattr(cli, "_dispatch", work)
    assert main(["eval"]) == 128 + number
    assert cleaned == [number]
    assert capsys.readouterr().err == "polyrhythm: interrupted\n"
    assert signal.getsignal(number) is before


def test_arguments_are_checked_by_argparse() -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", ".", "--episodes", "0"])
    assert end.value.code == 2


#: An interpreter in which the distribution polyrhythm-bench cannot be found, as where only polyrhythm is installed.
_WITHOUT_BENCH = """
import sys
sys.modules["polyrhythm_bench"] = None
from polyrhythm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words", [["bench", "conductor"], ["bench", "--help"], ["chaos", "cartpole", "--faults", "1"]], ids=" ".join
)
def test_without_polyrhythm_bench_its_commands_say_in_one_line_how_to_get_it(words: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_BENCH, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(
        f"polyrhythm: error: PR201: polyrhythm {words[0]}: the distribution polyrhythm-bench "
    )
    assert "pip install -e bench" in ended.stderr


def test_help_lists_the_commands_of_polyrhythm_bench_without_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BENCH, "--help"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert {"bench", "chaos"} <= {line.split()[0] for line in ended.stdout.splitlines() if line.startswith("    ")}


def test_a_run_is_trained_then_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two versions of cartpole: everything that the commands promise, on real parts."""
    folder = tmp_path / "run"
    small = ["training.versions=2", "training.mini_batch_samples=4", "rollout.rows=4", "evaluation.episodes=4"]
    assert main(["train", "cartpole", "launcher=inline", *small, "--out", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert {"before", "after", "ledger", "lag", "utilisation", "transitions_per_s", "wall_s"} <= set(summary)
    assert summary["ledger"]["trained"] == 8
    assert (folder / "config.yaml").is_file()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2
    assert json.loads((folder / "trace.json").read_text())

    assert main(["eval", str(folder), "--episodes", "6", "--seed", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 6
    assert (result["low"], result["rate"], result["high"]) == (None, None, None), "CartPole reports no success"


def test_results_in_words() -> None:
    from polyrhythm.cli import show

    result = {
        "after": {"successes": 117, "episodes": 160, "rate": 0.73125, "low": 0.6577, "high": 0.7939},
        "lag": 1.23456,
        "turns": [581.8333, 2],
    }
    assert show.lines(result) == "lag: 1.235\nturns: 581.8, 2\nafter: 73% [66, 79], 117 of 160 episodes"


def test_where_no_success_is_reported_the_return_leads() -> None:
    from polyrhythm.cli import show

    zero = {"successes": 0, "episodes": 32, "rate": 0.0, "low": 0.0, "high": 0.107, "mean_return": 481.25}
    null = {**zero, **dict.fromkeys(("successes", "rate", "low", "high"))}
    assert (
        show.lines({"after": null}) == "after: mean return 481.2, 32 episodes; the environment does not report success"
    )
    assert show.lines({"after": zero}) == "after: 0% [0, 11], 0 of 32 episodes, mean return 481.2"
    assert show.lines({**null, "version": 3}).splitlines()[0].startswith("mean return 481.2, 32 episodes; ")
    assert show.lines({**zero, "version": 3}).splitlines()[0].startswith("0% [0, 11], 0 of 32")


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    code = "import sys; from polyrhythm.cli.main import main; sys.exit(main(['envs', 'metaworld']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.close()
    _, said = writer.communicate(timeout=300)
    assert said == b""
    assert writer.returncode == 0


@pytest.mark.parametrize(
    ("obstacle", "is_folder"),
    [
        ("metrics.jsonl", True),
        ("tensorboard", False),
        ("checkpoints", False),
        ("policy.pt", True),
        ("progress.json.part", True),
        ("logs", False),
        (".lock", True),
    ],
)
def test_what_cannot_be_written_is_named_in_one_sentence(
    obstacle: str, is_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in a file's place and the other way round, since root may write everywhere."""
    recipe, folder = tmp_path / "small.yaml", tmp_path / "run"
    launcher = "local" if obstacle == "logs" else "inline"
    recipe.write_text(yaml.safe_dump(merge(LOCKSTEP, {"launcher": launcher, "training": {"versions": 1}})))
    folder.mkdir()
    save_config(load_config(str(recipe)), folder / "config.yaml")
    (folder / obstacle).mkdir() if is_folder else (folder / obstacle).touch()
    status = main(["train", str(recipe), f"resume={folder}"])
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("to resume: ")]
    assert status == 2
    assert len(told) == 1
    assert told[0].startswith("polyrhythm: error: ")
    assert str(folder / obstacle) in told[0]
