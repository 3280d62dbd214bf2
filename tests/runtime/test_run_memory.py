"""The run's folder in shared memory: reserved, refused with numbers, and taken away when its run is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.errors import StartError
from polyrhythm.runtime.memory.shared_folder import (
    SharedRunFolder,
    open_segment,
    refuse_shortage,
    remove_orphans,
    shared_root,
)

OTHER = """
import sys
from pathlib import Path
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
print(SharedRunFolder({"arena": 4096}, Path(sys.argv[1])).folder, flush=True)
sys.stdin.read()
"""


def another_run(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with memory of its own, which it keeps until its standard input ends, and then leaves behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def age(folder: Path, seconds: float) -> None:
    then = folder.stat().st_mtime - seconds
    os.utime(folder, (then, then))


def test_segments_are_zero_and_shared_with_everybody_who_opens_them(tmp_path: Path) -> None:
    memory = SharedRunFolder({"arena": 5000, "weights": 0}, tmp_path)
    one, other = memory.segment("arena"), open_segment(memory.folder, "arena")
    assert len(one) == 5000
    assert one[:] == bytes(5000)
    one[4999] = 7
    assert other[4999] == 7
    assert len(memory.segment("weights")) == 1, "an empty file cannot be mapped"
    memory.remove()
    assert list(tmp_path.iterdir()) == []
    assert other[4999] == 7, "who has it mapped keeps it"


def test_the_memory_is_reserved_at_once_and_seen_by_this_user_alone(tmp_path: Path) -> None:
    memory = SharedRunFolder({"arena": 1_000_000}, tmp_path)
    assert (memory.folder / "arena").stat().st_blocks * 512 >= 1_000_000
    assert memory.folder.stat().st_mode & 0o077 == 0
    memory.remove()


def test_too_little_memory_is_refused_with_what_is_wanted_and_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    sizes = {"arena": 10**15, "weights": 3_000_000}
    words = (
        r"shared memory: 1,000,000,003\.0 MB wanted \(arena 1,000,000,000\.0 MB, weights 3\.0 MB\), "
        rf"[\d,]+\.\d MB free in {tmp_path}; lower rollout\.rows, .*docker: --shm-size"
    )
    for refuse in (SharedRunFolder, refuse_shortage):
        with pytest.raises(StartError, match=words):
            refuse(sizes, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert abs(shutil.disk_usage(tmp_path).free - free) < 10**9
    refuse_shortage({"arena": 4096}, tmp_path)


def test_without_shared_memory_a_run_is_refused_and_a_folder_can_be_named(tmp_path: Path) -> None:
    missing = tmp_path / "shm"
    words = (
        rf"^shared memory: {missing} is no folder, 3\.0 MB are wanted there; mount it \(docker: --shm-size\), set "
        r"launcher=inline, or name another folder by POLYRHYTHM_SHARED_MEMORY"
    )
    with pytest.raises(StartError, match=words):
        shared_root({"arena": 1_000_000, "weights": 2_000_000}, missing, {})
    assert shared_root({}, missing, {"POLYRHYTHM_SHARED_MEMORY": str(tmp_path)}) == tmp_path
    assert shared_root({}, tmp_path, {}) == tmp_path
    with pytest.raises(StartError, match=rf"^POLYRHYTHM_SHARED_MEMORY = {missing} is no folder; name a folder that"):
        shared_root(None, tmp_path, {"POLYRHYTHM_SHARED_MEMORY": str(missing)})


def test_a_folder_that_cannot_be_filled_is_named_and_not_left(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(StartError, match=r"the folder .* cannot be filled \(No such file or directory\); make room in"):
        SharedRunFolder({"no/such/place": 4096}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_what_a_dead_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    process, folder = another_run(tmp_path)
    process.kill()
    process.communicate()
    assert folder.is_dir(), "a killed process cannot clean up"
    memory = SharedRunFolder({"arena": 4096}, tmp_path)
    assert list(tmp_path.iterdir()) == [memory.folder]
    memory.remove()


def test_a_live_runs_folder_is_left_alone(tmp_path: Path) -> None:
    process, folder = another_run(tmp_path)
    age(folder, 1e6)
    mine = SharedRunFolder({"arena": 4096}, tmp_path)
    assert remove_orphans(tmp_path) == []
    assert (folder / "arena").is_file()
    process.communicate("")
    assert remove_orphans(tmp_path) == [folder]
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.remove()


@pytest.mark.parametrize("locked", [False, True], ids=["without a lock", "with a lock that nobody has held yet"])
def test_a_folder_in_the_making_is_left_alone_while_it_is_young(tmp_path: Path, locked: bool) -> None:
    folder = tmp_path / f"polyrhythm-{os.getuid()}-0badcafe"
    folder.mkdir()
    if locked:
        (folder / "owner").touch()
    assert remove_orphans(tmp_path) == []
    age(folder, 3600)
    assert remove_orphans(tmp_path) == [folder]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / f"polyrhythm-{os.getuid() + 1}-0badcafe", tmp_path / "something else"]
    for folder in others:
        folder.mkdir()
        age(folder, 3600)
    (tmp_path / f"polyrhythm-{os.getuid()}-file").touch()
    age(tmp_path / f"polyrhythm-{os.getuid()}-file", 3600)
    assert remove_orphans(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_removing_twice_does_no_harm(tmp_path: Path) -> None:
    memory = SharedRunFolder({}, tmp_path)
    memory.remove()
    memory.remove()


def test_the_usual_place_can_be_written_to() -> None:
    assert os.access(shared_root(), os.W_OK)
