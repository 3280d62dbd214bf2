"""What leaves a device comes back with the same bits; its memory is really free meanwhile, and no file is left."""

from __future__ import annotations

import gc
import mmap
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.lease.offload import DeviceStore, FileStore, private_regions

MB, PAGE = 2**20, mmap.PAGESIZE


def pages_in_memory(tensors: list[Tensor]) -> int:
    """Bytes of the pages of these tensors that are in memory; of this process's other threads it counts nothing."""
    pages = {page for x in tensors for page in range(x.data_ptr() // PAGE, (x.data_ptr() + x.nbytes) // PAGE)}
    with Path("/proc/self/pagemap").open("rb") as entries:
        found = bytearray()
        for page in sorted(pages):
            entries.seek(8 * page)
            found += entries.read(8)
    return PAGE * sum(entry >> 63 for entry in np.frombuffer(found, np.uint64).tolist())


def some_tensors(size: int = 40 * MB) -> list[Tensor]:
    torch.manual_seed(1)
    large = torch.randn(size // 8)
    return [large, large[100:200], torch.randn(size // 8), torch.randn(3), torch.zeros(()), torch.empty(0)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path)
    yield store
    store.close()


def test_tensors_come_back_bit_equal_where_they_were_and_their_memory_is_free_meanwhile(store: FileStore) -> None:
    tensors = some_tensors()
    before, places = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    array = tensors[0].numpy()
    for _ in range(3):
        full = pages_in_memory(tensors)
        freed = store.suspend(tensors)
        assert 39 * MB < freed <= 40 * MB
        assert full - pages_in_memory(tensors) >= freed
        store.resume()
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
        assert [x.data_ptr() for x in tensors] == places
        assert (array == before[0].numpy()).all()
        for x in tensors:
            x.add_(1.0)
        before = [x.clone() for x in tensors]


def sizes_of_open_files(folder: Path) -> list[int]:
    """Bytes of this process's open files of the folder, those without a name too."""
    found = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link.stat().st_size for link in found if str(link.readlink()).startswith(str(folder))]


def test_the_file_has_no_name_and_gives_its_room_back(store: FileStore, tmp_path: Path) -> None:
    tensors = some_tensors()
    store.suspend(tensors)
    assert list(tmp_path.iterdir()) == []
    (size,) = sizes_of_open_files(tmp_path)
    assert size > MB
    store.resume()
    assert sizes_of_open_files(tmp_path) == [0]


def test_memory_that_others_share_stays_where_it_is(store: FileStore) -> None:
    shared = torch.ones(8 * MB, dtype=torch.uint8).share_memory_()
    assert store.suspend([shared]) == 0
    assert shared.sum() == 8 * MB
    store.resume()


def test_neighbours_in_the_same_pages_are_not_touched(store: FileStore) -> None:
    torch.manual_seed(2)
    tensors = [torch.randn(1500) for _ in range(200)]
    kept = [x.clone() for x in tensors]
    store.suspend(tensors[::2])
    assert all(torch.equal(x, y) for x, y in zip(tensors[1::2], kept[1::2], strict=True))
    gc.collect()
    store.resume()
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("small", [False, True])
def test_without_room_nothing_is_freed_and_the_error_says_where(small: bool, tmp_path: Path) -> None:
    tensors = [torch.ones(2048)] if small else some_tensors(MB)  # the small one fits into the file's buffer
    before = [x.clone() for x in tensors]
    store = FileStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if small else MB // 2, hard))
    try:
        with pytest.raises(RunHalted, match=r"placement.sharing = lease: \d+ bytes .*File too large.*make room there"):
            store.suspend(tensors)
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunHalted, match=r"cannot be put into .*missing"):
        FileStore(tmp_path / "missing").suspend(some_tensors(MB))


def test_regions_are_private_writable_and_belong_to_no_file() -> None:
    regions = private_regions()
    assert regions == sorted(regions)
    assert all(a[1] < b[0] for a, b in pairwise(regions))


@pytest.mark.gpu
def test_a_cuda_devices_memory_is_free_meanwhile_and_comes_back_bit_equal(cuda: torch.device) -> None:
    tensors = [x.to(cuda) for x in some_tensors()]
    tensors[1] = tensors[0][100:200]
    before = [x.cpu() for x in tensors]
    store = DeviceStore(str(cuda))
    full = torch.cuda.memory_allocated(cuda)
    freed = store.suspend(tensors)
    assert freed >= 40 * MB
    assert torch.cuda.memory_allocated(cuda) <= full - 40 * MB
    store.resume()
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, before, strict=True))
