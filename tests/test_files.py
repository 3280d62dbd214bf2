"""Files are there whole or not at all, and a full disk is said in one line."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from polyrhythm.files import atomic_write, link_or_copy
from polyrhythm.plugins.demonstrations.imitation import Demonstrations
from polyrhythm.training.checkpoint import save_state

FULL = Path("/dev/full")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file of which not a byte can be written: every write to it finds the disk full."""
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    file = tmp_path / "file"
    file.with_name("file.part").symlink_to(FULL)
    return file


def test_what_was_there_stays_until_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with atomic_write(file) as unfinished:
        unfinished.write_text("after")
        assert file.read_text() == "before"
    assert file.read_text() == "after"
    assert list(tmp_path.iterdir()) == [file]


def test_what_was_not_finished_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "file") as unfinished:
        unfinished.write_text(str(1 // 0))
    assert not list(tmp_path.iterdir())


def test_a_state_and_demonstrations_tell_a_full_disk_as_what_it_is(full: Path) -> None:
    demonstrations = Demonstrations({"x": np.zeros((1000, 3))}, np.zeros((1000, 1, 1)))
    for save in (demonstrations.save, lambda path: save_state({"weights": torch.zeros(100_000)}, path)):
        part = full.with_name("file.part")
        if not part.is_symlink():
            part.symlink_to(FULL)
        with pytest.raises(OSError, match="No space left") as raised:
            save(full)
        assert raised.value.errno == errno.ENOSPC
        assert not list(full.parent.iterdir())


def test_a_link_is_the_same_file_and_stays_when_the_first_name_is_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("before")
    link_or_copy(source, target)
    assert target.samefile(source)
    with atomic_write(source) as unfinished:
        unfinished.write_text("after")
    assert (source.read_text(), target.read_text()) == ("after", "before")


def test_from_another_file_system_it_is_a_copy(tmp_path: Path) -> None:
    source = Path("/proc/version")
    if not source.exists():
        pytest.skip("this system has no /proc")
    link_or_copy(source, tmp_path / "target")
    assert not (tmp_path / "target").samefile(source)
    assert (tmp_path / "target").read_text() == source.read_text()
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "missing", tmp_path / "other")
