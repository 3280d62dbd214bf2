"""Lent prefixes between two ends: in one process, in two, and after the death of one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.long import long

from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixPool, PrefixSeat, frozen_checksum, row_specs
from polyrhythm.runtime.memory.published import lock_file
from polyrhythm.specs.hashing import row_digests

MIB = 2**20


def arrays(rows: int, first: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Precomputed arrays that tell the rows apart."""
    number = torch.arange(first, first + rows)
    keys = number.view(-1, 1, 1).expand(rows, 2, 3).to(dtype)
    return {"keys": keys, "present": (number % 2 == 0).view(-1, 1), "features": number.view(-1, 1).float() / 3}


SPECS = row_specs(arrays(1))


def seat(run: object, *, shared: bool = True, device: str = "cpu") -> PrefixSeat:
    return PrefixSeat(str(run), shared, device, device)


def end(run: object, checksum: int = 7, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Prefixes:
    """A process's end, of frozen tensors of this checksum."""
    return Prefixes(seat(run, **changes), row_specs(arrays(1, dtype=dtype)), lambda: checksum)  # type: ignore[arg-type]


def write(pool: PrefixPool, entries: NDArray[np.int64], first: int) -> None:
    assert pool.claim(entries).all()
    write_claimed(pool, entries, first)


def write_claimed(pool: PrefixPool, entries: NDArray[np.int64], first: int) -> None:
    device = pool.arrays["keys"].device
    found = {name: x.to(device) for name, x in arrays(len(entries), first).items()}
    pool.write(torch.from_numpy(np.stack((entries, np.arange(len(entries))))).to(device), found)
    if device.type == "cuda":
        torch.cuda.synchronize()


def lend(pool: PrefixPool, entries: list[int], first: int) -> None:
    at = np.array(entries)
    write(pool, at, first)
    pool.stamp(at, at + 1000)


def held(pool: PrefixPool, entries: list[int], digests: list[int] | None = None) -> list[bool]:
    at = np.array(entries)
    found: list[bool] = pool.holds(at, at + 1000 if digests is None else np.array(digests)).tolist()
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_lent_is_found_by_entry_and_observation(shared: bool, tmp_path: Path) -> None:
    trainer, generator = end(tmp_path, shared=shared), end(tmp_path, shared=shared)
    assert generator.find() is None
    assert trainer.find() is None, "no trainer has made a pool"
    trainer.create(10, MIB)
    pool = generator.find()
    assert pool is not None
    assert held(pool, [0, 3]) == [False, False]
    lend(pool, [3, 9, 0], 20)
    found = trainer.find()
    assert found is not None
    assert held(found, [0, 1, 3, 9]) == [True, False, True, True]
    assert held(found, [3], [1004]) == [False], "another observation"
    assert held(found, [10, -1, 2**40]) == [False] * 3, "entries without a slot"
    expected = arrays(3, 20)
    assert all(torch.equal(x[[3, 9, 0]], expected[name]) for name, x in found.arrays.items())
    assert pool.claim(np.array([3])).all()
    pool.write(torch.tensor([[3], [1]]), arrays(2, 50))
    assert held(found, [3, 9]) == [False, True], "while it is written"
    pool.stamp(np.array([3]), np.array([5]))
    assert held(found, [3], [5]) == [True]
    assert found.arrays["keys"][3, 0, 0] == 51


def test_a_pool_has_as_many_slots_as_its_memory_holds(tmp_path: Path) -> None:
    row = 3 * 64  # each array is aligned
    for limit, slots in ((row, 1), (10 * row + 5, 10), (MIB, 40)):
        trainer = end(tmp_path / str(limit), shared=False)
        trainer.create(40, limit)
        pool = trainer.find()
        assert pool is not None
        assert pool.slots == slots or (slots == 10 and 10 <= pool.slots <= 40)
        assert pool.nbytes <= max(limit, row)
    for entries, limit in ((0, MIB), (5, 0), (5, row - 1)):
        nothing = end(tmp_path / f"{entries} {limit}", shared=False)
        nothing.create(entries, limit)
        assert nothing.find() is None


@pytest.mark.parametrize("shared", [True, False])
def test_ends_of_other_weights_or_another_form_lend_nothing(shared: bool, tmp_path: Path) -> None:
    trainer = end(tmp_path, shared=shared)
    trainer.create(4, MIB)
    assert end(tmp_path, checksum=8, shared=shared).find() is None
    assert end(tmp_path, dtype=torch.float32, shared=shared).find() is None
    assert end(tmp_path, device="cuda:0", shared=shared).find() is None
    assert end(tmp_path / "other", shared=shared).find() is None
    assert end(tmp_path, shared=shared).find() is not None


def test_the_checksum_is_of_frozen_tensors_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.Linear(70, 3))
    published = {"1.weight", "1.bias"}
    first = frozen_checksum(module, dict.fromkeys(published))
    with torch.no_grad():
        module[1].weight.add_(1)
    assert frozen_checksum(module, dict.fromkeys(published)) == first
    assert frozen_checksum(module.double(), dict.fromkeys(published)) != first
    module.float()
    for place in ((0, 0), (69, 299), (31, 7)):
        with torch.no_grad():
            module[0].weight[place] *= 1.5
        other = frozen_checksum(module, dict.fromkeys(published))
        assert other != first
        first = other
    with torch.no_grad():
        module[0].bias[0] += 1e-6
    assert frozen_checksum(module, dict.fromkeys(published)) != first


def test_a_digest_tells_observations_apart() -> None:
    rng = np.random.default_rng(0)
    obs = {
        "image": rng.integers(0, 255, (3, 8, 8, 3), np.uint8),
        "state": rng.normal(size=(3, 5)),
        "flag": rng.random(3) > 2,
    }
    digests = row_digests(obs)
    assert digests.dtype == np.int64
    assert len(set(digests.tolist())) == 3
    assert digests.min() > 0
    assert np.array_equal(row_digests(dict(reversed(obs.items()))), digests)
    assert np.array_equal(row_digests({name: array[[2, 0]] for name, array in obs.items()}), digests[[2, 0]])
    for name, place in (("image", (1, 7, 7, 2)), ("state", (1, 0)), ("flag", (1,))):
        changed = {**obs, name: obs[name].copy()}
        changed[name][place] += np.asarray(1, obs[name].dtype)
        assert (row_digests(changed) != digests).tolist() == [False, True, False], name
    assert len(row_digests({name: array[:0] for name, array in obs.items()})) == 0


def elsewhere(run: Path, **changes: object) -> Prefixes:
    """An end that opens the pool as one of another process does: the run has another name."""
    return end(f"{run}/.", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_slot_that_a_pass_still_writes_is_not_lent_to_another_sample(
    shared: bool, late: bool, tmp_path: Path
) -> None:
    trainer = end(tmp_path, shared=shared)
    trainer.create(6, MIB)
    first, second = trainer.find(), elsewhere(tmp_path).find() if shared else end(tmp_path, shared=False).find()
    assert first is not None
    assert second is not None
    entries = np.array([1, 4])
    assert first.claim(entries).all()
    if not late:
        write_claimed(first, entries, 20)
    # The block of both was freed, and another generator answers its next sample.
    again = np.array([0, 4, 1, 0, 6, -1])
    assert second.claim(again).tolist() == [True, False, False, False, False, False]
    write_claimed(second, again[:1], 30)
    second.stamp(again[:1], np.array([99]))
    if late:
        write_claimed(first, entries, 20)
    first.stamp(entries, entries + 1000)
    assert held(second, [0, 1, 4], [99, 1001, 1004]) == [True] * 3
    assert first.arrays["keys"][:, 0, 0][[0, 1, 4]].tolist() == [30, 20, 21]
    assert second.claim(entries).all(), "after the pass"


def test_nobody_waits_for_a_claim(tmp_path: Path) -> None:
    trainer = end(tmp_path)
    trainer.create(6, MIB)
    pool = elsewhere(tmp_path).find()
    assert pool is not None
    with lock_file(tmp_path / "prefixes" / "cpu" / "claims", fcntl.LOCK_EX):
        assert pool.claim(np.array([1, 4])).tolist() == [False, False]
    assert pool.claim(np.array([1, 4])).tolist() == [True, True]


@pytest.mark.parametrize("gone", [False, True])
def test_the_pool_of_a_dead_trainer_is_not_kept_in_memory(gone: bool, tmp_path: Path) -> None:
    trainer, generator = end(tmp_path), elsewhere(tmp_path)
    trainer.create(6, MIB)
    pool = generator.find()
    assert pool is not None
    kept = weakref.ref(pool)
    if gone:
        (tmp_path / "prefixes" / "cpu" / "pool").unlink()
    del pool, trainer
    assert generator.find() is None
    assert kept() is None


def test_a_refused_pool_is_known_by_its_number_not_by_its_file(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    trainers = [end(folder, checksum) for folder, checksum in zip(folders, (8, 7), strict=True)]
    for folder, trainer in zip(folders, trainers, strict=True):
        folder.mkdir()
        trainer.create(6, MIB)
    files = [folder / "prefixes" / "cpu" / "pool" for folder in folders]
    generator = elsewhere(folders[0])
    assert generator.find() is None
    files[0].write_bytes(files[1].read_bytes())  # the same inode
    assert generator.find() is not None


TRAINER = """
import sys
from tests.runtime.test_prefixes import MIB, end, held
trainer = end(sys.argv[1], device=sys.argv[2])
trainer.create(6, MIB)
for line in sys.stdin:
    pool = trainer.find()
    print(held(pool, [0, 2]), [float(pool.arrays["keys"][at, 1, 2]) for at in (0, 2)], flush=True)
"""
GENERATOR = """
import sys, time
import numpy as np
from tests.runtime.test_prefixes import end, lend, write
pool = end(sys.argv[1], device=sys.argv[2]).find()
lend(pool, [0], 30)
write(pool, np.array([2]), 40)
print("writing", flush=True)
time.sleep(300)
"""


def process(script: str, folder: Path, device: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, str(folder), device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def asked(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    return trainer.stdout.readline().strip()


def check_deaths(tmp_path: Path, device: str) -> None:
    with process(TRAINER, tmp_path, device) as trainer:
        try:
            assert asked(trainer) == "[False, False] [0.0, 0.0]"
            with process(GENERATOR, tmp_path, device) as generator:
                assert generator.stdout is not None
                assert generator.stdout.readline() == "writing\n"
                generator.send_signal(signal.SIGKILL)
            assert asked(trainer) == "[True, False] [30.0, 40.0]", "what it was writing is not there"
            successor = end(tmp_path, device=device)
            pool = successor.find()
            assert pool is not None
            assert pool.claim(np.array([2, 3])).tolist() == [False, True], "what the dead one was writing"
            lend(pool, [0], 50)
            assert asked(trainer) == "[True, False] [50.0, 40.0]"
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
    assert successor.find() is None, "the trainer is dead"
    with process(TRAINER, tmp_path, device) as trainer:
        assert asked(trainer) == "[False, False] [0.0, 0.0]", "its successor has a pool of its own"
        other = successor.find()
        assert other is not None
        lend(other, [0], 60)
        assert asked(trainer) == "[True, False] [60.0, 0.0]"


@long(5, "prefixes of dead processes; test_lent_prefixes.py kills one in a run")
def test_prefixes_of_dead_generators_stay_and_pools_of_dead_trainers_are_not_used(tmp_path: Path) -> None:
    check_deaths(tmp_path, "cpu")
