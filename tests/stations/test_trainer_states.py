"""Where a trainer's state is kept, as a file or as a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.plugins.ranks.folders import save_as_folder

from polyrhythm.errors import RunHalted
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import Saved, load, save_state
from polyrhythm.training.ranks import Ranks as OneRank


class Ranks(OneRank):
    """One of two ranks, as far as saving knows."""

    size = 2

    def __init__(self, rank: int, strategy: str) -> None:
        self.rank, self.divides = rank, strategy == "shard"


class Saving:
    """What saving a learner does, without one."""

    def __init__(self, updates: int, rank: int = 0, strategy: str = "replicate") -> None:
        self.updates, self.ranks, self.saved = updates, Ranks(rank, strategy), []  # type: ignore[var-annotated]

    def save(self, path: Path, *, background: bool = False) -> Saved:
        self.saved.append(path.name)
        if self.ranks.rank == 0:
            (save_as_folder if self.ranks.divides else save_state)(state(self.updates), path)
        return Saved()


def state(updates: int) -> dict[str, object]:
    return {"policy": {"w": torch.full((2, 3), float(updates))}, "optimizer": {}, "updates": updates}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_states_are_kept_whatever_their_form(tmp_path: Path) -> None:
    states = TrainerStates(str(tmp_path), keep=2)
    for learner in (Saving(1), Saving(2, strategy="shard"), Saving(10, strategy="shard"), Saving(11)):
        states.save(learner).wait()  # type: ignore[arg-type]
    assert [path.name for path in states.paths()] == names(tmp_path) == ["trainer-00000010", "trainer-00000011.pt"]
    assert [states.updates(path) for path in states.paths()] == [10, 11]


def test_the_state_of_every_nth_version_stays(tmp_path: Path) -> None:
    states = TrainerStates(str(tmp_path), every_versions=3, keep=1, keep_every=2, sync_interval=2)
    assert [version for version in range(1, 9) if states.due(version)] == [2, 3, 4, 6, 8]
    for version in range(1, 8):
        if states.due(version):
            states.save(Saving(2 * version)).wait()  # type: ignore[arg-type]
    assert [states.updates(path) for path in states.paths()] == [4, 8, 12]
    save_state(state(10), tmp_path / "other.pt")
    states.reset(tmp_path / "other.pt")
    assert [states.updates(path) for path in states.paths()] == [4, 8, 10], "later ones are of updates done again"


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_rank_above_0_takes_part_and_removes_nothing(strategy: str, tmp_path: Path) -> None:
    states = TrainerStates(str(tmp_path), keep=1)
    for updates in (1, 2):
        save_state(state(updates), tmp_path / f"trainer-{updates:08d}.pt")
    learner = Saving(3, 1, strategy)
    states.save(learner).wait()  # type: ignore[arg-type]
    assert learner.saved == ["trainer-00000003" + ".pt" * (strategy == "replicate")]
    assert names(tmp_path) == ["trainer-00000001.pt", "trainer-00000002.pt"]


def test_a_trainer_begins_again_with_a_state_of_either_form_alone(tmp_path: Path) -> None:
    states = TrainerStates(str(tmp_path / "mine"))
    for learner in (Saving(1), Saving(2, strategy="shard")):
        states.save(learner).wait()  # type: ignore[arg-type]
    other = save_as_folder(state(7), tmp_path / "trainer")
    states.reset(other)
    assert names(tmp_path / "mine") == ["trainer-00000007"]
    assert names(tmp_path / "mine" / "trainer-00000007") == names(other)
    assert torch.equal(load(states.paths()[0])["policy"]["w"], torch.full((2, 3), 7.0))
    save_state(state(8), tmp_path / "trainer.pt")
    states.reset(tmp_path / "trainer.pt")
    assert names(tmp_path / "mine") == ["trainer-00000008.pt"]
    states.reset(None)
    assert names(tmp_path / "mine") == []


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_what_a_killed_trainer_left_unfinished_is_gone_with_the_next_state(strategy: str, tmp_path: Path) -> None:
    for name in ("trainer-00000003.part", "trainer-00000001.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__7_0.distcp").write_text("old")
    (tmp_path / "trainer-00000002.pt.part").write_text("old")
    TrainerStates(str(tmp_path)).save(Saving(3, strategy=strategy)).wait()  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    assert TrainerStates.holds(path)
    assert path.is_file() or names(path) == [".metadata", "__0_0.distcp", "index"]


def test_what_else_lies_there_is_no_state(tmp_path: Path) -> None:
    states = TrainerStates(str(tmp_path))
    for name in ("trainer-old.pt", "trainer-3.txt", "trainer-00000004"):
        (tmp_path / name).write_text("mine")
    for name in ("trainer-00000005.pt", "trainer-00000006.part", "trainer-x"):
        (tmp_path / name).mkdir()
    assert states.paths() == []
    states.reset(None)
    assert len(names(tmp_path)) == 6


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for strategy in ("replicate", "shard"):
        with pytest.raises(RunHalted, match=r"file cannot be written .*; move it away"):
            TrainerStates(str(tmp_path / "file")).save(Saving(1, strategy=strategy))  # type: ignore[arg-type]
