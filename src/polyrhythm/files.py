"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What the system says when it has no room: a full disk, a full quota.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The path to write to in `path`'s stead, `<path>.part`, which takes its name when the block ends well.

    When the block raises, what was written is gone; whoever is killed in it leaves what was there before.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
