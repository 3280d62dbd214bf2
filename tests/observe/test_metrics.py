from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.observe.metrics import MetricsWriter, rewind


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_there_before_close_and_a_resumed_run_appends(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(0, {"train/actor/policy_loss": 0.5}, time_s=1.23456)
        assert _lines(tmp_path) == [{"step": 0, "time_s": 1.235, "train/actor/policy_loss": 0.5}]
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(1, {"staleness/lag_mean": 1, "env/success_once": True}, time_s=2)
    assert [line["step"] for line in _lines(tmp_path)] == [0, 1]


def test_a_rewound_run_forgets_the_updates_that_it_does_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(0, {"train/sft/loss": 1.0}, time_s=1)
        metrics.log(0, {"evaluation/greedy/rate": 0.5}, time_s=2)
        for step in range(3):
            metrics.log(step, {"throughput/transitions_per_s": 9.0}, time_s=3 + step)
    whole = _lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time_s": 6, "thr')
    for step, kept in ((3, 5), (2, 4), (0, 2)):
        rewind(tmp_path, step)
        assert _lines(tmp_path) == whole[:kept]
    rewind(tmp_path / "nowhere", 0)


def test_not_a_number_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(0, {"train/actor/policy_loss": float("nan"), "train/critic/value_loss": float("inf")}, time_s=0)
    assert _lines(tmp_path) == [
        {"step": 0, "time_s": 0, "train/actor/policy_loss": None, "train/critic/value_loss": None}
    ]


@pytest.mark.parametrize("name", ["train/acto/loss", "env", "train/x", "policy_kl"])
def test_undocumented_names_are_refused_and_write_nothing(name: str, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics, pytest.raises(ValueError, match="documented group"):
        metrics.log(0, {"train/critic/value_loss": 1.0, name: 1.0}, time_s=0)
    assert _lines(tmp_path) == []


def test_writing_needs_no_torch_and_warns_of_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from polyrhythm.observe.metrics import MetricsWriter\n"
        "w = MetricsWriter(Path(sys.argv[1])); w.log(0, {'train/actor/policy_loss': 1.0}, 0.0); w.close()\n"
        "print([name for name in ('torch', 'tensorboard') if name in sys.modules])"
    )
    import polyrhythm

    source = str(Path(polyrhythm.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": source},
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
