"""What was changed in a run's settings: noted, read back, and moved where the run goes back."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from polyrhythm.observe.run_folder import CHANGES_FILE, note_changes, read_changes

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_changes_are_read_as_they_were_noted(tmp_path: Path) -> None:
    note_changes(tmp_path, 0, {}, NOW)
    assert not (tmp_path / CHANGES_FILE).exists(), "nothing was changed"
    note_changes(tmp_path, 4, {"training.versions": (3, 6), "evaluation.every": (0, 1)}, NOW)
    note_changes(tmp_path, 9, {"training.optimizer.lr": (1e-3, 1e-4)}, NOW)
    found = read_changes(tmp_path)
    assert [change[1:] for change in found] == [
        (4, "training.versions", 3, 6),
        (4, "evaluation.every", 0, 1),
        (9, "training.optimizer.lr", 1e-3, 1e-4),
    ]
    assert {change.time for change in found} == {"2030-01-02T03:04:05+00:00"}


def test_a_run_that_goes_back_has_the_new_settings_from_there_on(tmp_path: Path) -> None:
    note_changes(tmp_path, 4, {"training.versions": (3, 6)}, NOW)
    note_changes(tmp_path, 9, {"training.optimizer.lr": (1e-3, 1e-4)}, NOW)
    note_changes(tmp_path, 7, {}, NOW)
    assert [change.update for change in read_changes(tmp_path)] == [4, 7]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    note_changes(tmp_path, 4, {"training.versions": (3, 6)}, NOW)
    with (tmp_path / CHANGES_FILE).open("ab") as file:
        file.write(b'\xff\n[]\n3\n{"update": 1}\n{"update": "x", "changes": {}}\n{"update": 1, "changes": {"a": 1}}\n')
    assert len(read_changes(tmp_path)) == 1
