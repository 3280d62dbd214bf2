"""The versions of the weights when a trainer, or a run, comes back: worked out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.scheduler.versions import VersionLedger


def ledger(story: str, interval: int = 2) -> VersionLedger:
    """`u`: an update is trained; a digit: that version is published."""
    versions = VersionLedger(SchedulerSettings(batch_size=1, sync_interval=interval))
    for word in story:
        if word == "u":
            versions.count_update()
        else:
            versions.on_published(int(word))
    return versions


def state(versions: VersionLedger) -> tuple[int, int, int]:
    return versions.trained, versions.in_version, versions.updates


# K=2, so version v is reached after 2v updates. Version 0 is published at the start.
RESTARTS = [
    # story, updates of the trainer that comes back → undone, publish, (trained, in_version, updates)
    ("", 0, (0, True, (0, 0, 0))),  # nothing was ever published
    ("0", 0, (0, False, (0, 0, 0))),
    ("0u", 1, (0, False, (0, 1, 1))),
    ("0u", 0, (1, False, (0, 0, 0))),
    ("0uu", 2, (0, True, (1, 0, 2))),  # version 1 was being published
    ("0uu", 1, (1, False, (0, 1, 1))),  # nobody has seen version 1
    ("0uu", 0, (2, False, (0, 0, 0))),
    ("0uu1", 2, (0, False, (1, 0, 2))),
    ("0uu1", 1, (1, True, (2, 0, 1))),  # version 1 was seen, so what is older becomes version 2
    ("0uu1", 0, (2, True, (2, 0, 0))),
    ("0uu1uuu", 4, (1, True, (2, 0, 4))),
    ("0uu1uuu", 3, (2, False, (1, 1, 3))),
    ("0uu1uuu", 2, (3, False, (1, 0, 2))),
    ("0uu1uuu", 1, (4, True, (3, 0, 1))),  # version 2 was trained, so its number is used up
    ("0uuuu1", 4, (0, True, (2, 0, 4))),  # two versions were trained before the first was published
    ("0uuuu1", 3, (1, False, (1, 1, 3))),
    ("0uu1uu2uu3uu4", 8, (0, False, (4, 0, 8))),
    ("0uu1uu2uu3uu4", 7, (1, True, (5, 0, 7))),
]


@pytest.mark.parametrize(("story", "updates", "wanted"), RESTARTS)
def test_a_trainer_that_comes_back(story: str, updates: int, wanted: tuple[int, bool, tuple[int, int, int]]) -> None:
    versions = ledger(story)
    published = versions.published
    assert (*versions.restart(updates), state(versions)) == wanted
    assert versions.published == published
    assert versions.trained >= versions.published, "versions that were seen never go back"


@pytest.mark.parametrize(("story", "updates", "wanted"), RESTARTS)
def test_after_a_restart_versions_go_on_rising_and_another_restart_is_counted_from_there(
    story: str, updates: int, wanted: tuple[int, bool, tuple[int, int, int]]
) -> None:
    versions = ledger(story)
    seen = versions.published
    versions.restart(updates)
    if wanted[1]:
        versions.on_published(versions.trained)
        assert versions.published > seen
    trained, in_version, _ = state(versions)
    completed = [versions.count_update() for _ in range(4)]
    assert completed == ([True, False, True, False] if in_version else [False, True, False, True])
    assert state(versions) == (trained + 2, in_version, updates + 4)
    assert versions.restart(updates + 4 - 1)[0] == 1
    assert state(versions)[1:] == (1 - in_version, updates + 3)


def test_weights_that_the_run_itself_offers_are_as_if_published() -> None:
    versions = ledger("0uu1uuu")
    versions.on_published(2)  # a resumed run puts version 2 where generators find it
    assert versions.restart(4) == (1, False)
    assert state(versions) == (2, 0, 4)


def test_an_older_publication_changes_nothing() -> None:
    versions = ledger("0uu1uu2")
    versions.on_published(1)
    assert versions.published == 2
    assert versions.restart(4) == (0, False)


@given(st.integers(1, 4), st.lists(st.sampled_from("uuuwwplo"), max_size=40), st.randoms(use_true_random=False))
def test_versions_only_rise_whatever_is_lost_and_wherever_a_run_goes_on(
    interval: int, story: list[str], rng: random.Random
) -> None:
    """`u`: an update is trained; `w`: the trained version is written, `p`: and heard of; `l`: the trainer comes back
    with any earlier updates; `o`: so does the whole run, which offers a version that is published or was written."""
    versions = VersionLedger(SchedulerSettings(batch_size=1, sync_interval=interval))
    versions.on_published(0)
    written = 0
    for word in story:
        seen = versions.published
        if word == "u":
            versions.count_update()
        elif word in "wp":
            written = max(written, versions.trained)
            versions.on_published(versions.trained if word == "p" else seen)
        else:
            versions.on_published(written if word == "o" else seen)
            updates, before = rng.randint(0, versions.updates), versions.updates
            undone, publish = versions.restart(updates)
            assert (undone, versions.updates) == (before - updates, updates)
            assert publish == (versions.trained > versions.published)
            if not publish:
                assert versions.reached[versions.published] <= updates, "what is published is an ancestor"
        assert versions.trained >= versions.published >= seen
        assert 0 <= versions.in_version < interval
        assert versions.reached[versions.trained] + versions.in_version == versions.updates


def test_a_version_whose_updates_were_undone_is_nobodys_so_the_trainer_gets_the_next_number() -> None:
    versions = ledger("0uu")  # version 1 was written, and the trainer died before it said so
    assert versions.restart(0) == (2, False)
    versions.count_update()
    versions.on_published(1)  # the run is resumed with what was written
    assert versions.restart(1) == (0, True)
    assert state(versions) == (2, 0, 1)


def test_updates_in_each_version_also_after_undone_ones_and_another_k() -> None:
    versions = ledger("0uu1uu2uu")  # K=2; version 3 is trained, not published
    assert [versions.updates_in(version) for version in range(4)] == [0, 2, 4, 6]
    versions.restart(3)  # an update of version 2, which generators have seen, is undone
    assert versions.trained == 4
    assert [versions.updates_in(version) for version in (0, 1, 2, 4)] == [0, 2, 4, 3]
    versions.count_update()
    versions.count_update()
    assert (versions.trained, versions.updates_in(5)) == (5, 5)
    versions.settings = SchedulerSettings(batch_size=1, sync_interval=3)  # resumed with another K
    for _ in range(6):
        versions.count_update()
    assert [versions.updates_in(version) for version in (2, 4, 5, 6, 7)] == [4, 3, 5, 8, 11]
