"""An env batch with spare rows that a separate thread resets for coming episodes while the others step.

A row whose next episode is ready in a spare row swaps with that row, so the slot does not wait for the reset. An
episode depends on its task and seed alone, so it is the same as after a reset in place.

The wrapped batch must allow a reset in another thread while its other rows reset, step or are observed
(`EnvTraits.resets_ahead` of its settings).

Invariants: each row of the wrapped batch is either that of one row here or a spare; the thread touches only spares that
it has marked as not ready, and no other thread touches those; a spare that a row has claimed is reset for no other
episode before they have swapped, whatever the forecast; no step is begun in a spare row.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import (
    EnvBatch,
    FullEnvBatch,
    RowNumbers,
    RowsFailed,
    StepResult,
    batch_traits,
    wrapped_traits,
)

log = logging.getLogger(__name__)

#: How long `close` waits for a reset under way, in seconds.
CLOSE_S = 30.0

#: Task and seed.
Start = tuple[int, int]


@dataclass(slots=True)
class _Spare:
    """A spare row. row: its number in the wrapped batch; start, error: of its reset; claimed: by a row."""

    row: int
    start: Start | None = None
    ready: bool = True
    claimed: bool = False
    error: BaseException | None = None


class ResetAhead:
    """`inner` without its last `spares` rows. ready, waited, in_place: number of resets by a ready spare row, by one
    still being reset, and without one. spares: guarded by `changed`."""

    def __init__(self, inner: EnvBatch, spares: int) -> None:
        self.inner, self.spec, self.rows = cast(FullEnvBatch, inner), inner.spec, inner.rows - spares
        had = batch_traits(inner)
        self.traits, self._prepares_observations = wrapped_traits(self, had), had.prepares_observations
        self.ready = self.waited = self.in_place = 0
        self._place = np.arange(self.rows)
        self.spares = [_Spare(self.rows + index) for index in range(spares)]
        self._wanted: list[Start] = []
        self._kept: list[Start] = []
        self.changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._open: set[int] = set()  # rows whose step was begun

    def prepare(self, episodes: Sequence[Start], begun: Sequence[Start]) -> None:
        """Reset spare rows for these episodes (task, seed), in order. Returns at once. begun: episodes that are about
        to begin, whose spare rows are kept for them."""
        with self.changed:
            self._wanted, self._kept = list(episodes), list(begun)
            self.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._prepare_all, name="reset ahead", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ the rows

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes: by the spare row that has the episode, waiting for its reset if needed, else in place."""
        failed: dict[int, Exception] = {}
        begun = list(zip(map(int, rows), map(int, tasks), map(int, seeds), strict=True))
        spares = [self._claim((task, seed)) for _, task, seed in begun]  # all before the first wait
        for (row, task, seed), spare in zip(begun, spares, strict=True):
            if spare is not None:
                self._exchange(row, spare, (task, seed), failed)
        left = [begins for begins, spare in zip(begun, spares, strict=True) if spare is None]
        self.in_place += len(left)
        self._mark_done([row for row, _, _ in left])
        if left:
            chosen = [row for row, _, _ in left]
            try:
                self.inner.reset(
                    self._place[chosen].tolist(), [task for _, task, _ in left], [seed for _, _, seed in left]
                )
            except RowsFailed as raised:
                failed |= self._translated(raised, chosen).errors
            except Exception as error:
                if len(left) == len(begun):
                    raise
                failed |= dict.fromkeys(chosen, error)
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        try:
            result = self.inner.step(self._places(rows), actions)
        except RowsFailed as raised:
            self._mark_done(rows)
            raise self._translated(raised, rows) from raised
        self._mark_done(rows)
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        try:
            self.inner.observe(self._places(rows), out)
        except RowsFailed as raised:
            raise self._translated(raised, rows) from raised

    def discard(self, row: int) -> None:
        self.inner.discard(int(self._place[row]))

    def begin_step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> None:
        self._open.update(map(int, rows))
        self.inner.begin_step(self._places(rows), actions)

    def drop_step(self, rows: RowNumbers) -> None:
        self._mark_done(rows)
        self.inner.drop_step(self._places(rows))

    def waits(self, rows: RowNumbers) -> bool:
        return self.inner.waits(self._places(rows))

    def fileno(self) -> int:
        return self.inner.fileno()

    def _mark_done(self, rows: RowNumbers) -> None:
        """No step is under way in these rows any more."""
        if self._open:
            self._open.difference_update(map(int, rows))

    def texts(self, row: int) -> Sequence[str]:
        return self.inner.texts(int(self._place[row]))

    def close(self) -> None:
        """Close the wrapped batch, unless a reset hangs: then the end of the process frees it."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("a reset ahead did not end within %.0f s; its environment is left open", CLOSE_S)
                return
        self.inner.close()

    def _places(self, rows: RowNumbers) -> NDArray[np.intp]:
        """Row numbers in the wrapped batch; accepts an empty list."""
        return self._place[np.asarray(rows, np.intp)]

    def _translated(self, raised: RowsFailed, rows: RowNumbers) -> RowsFailed:
        names = {int(self._place[row]): int(row) for row in rows}
        return RowsFailed({names.get(row, row): error for row, error in raised.errors.items()}, raised.result)

    # ------------------------------------------------------------ the spares

    def _claim(self, start: Start) -> _Spare | None:
        """Claim a spare row with this episode, ready or not; None if there is none."""
        with self.changed:
            # No spare row is kept or reset for this episode any more.
            for starts in (self._kept, self._wanted):
                if start in starts:
                    starts.remove(start)
                    break
            having = [spare for spare in self.spares if spare.start == start and not spare.claimed]
            if not having:
                return None
            spare = max(having, key=lambda spare: spare.ready)
            self.ready, self.waited = self.ready + spare.ready, self.waited + (not spare.ready)
            spare.claimed = True
            return spare

    def _exchange(self, row: int, spare: _Spare, start: Start, failed: dict[int, Exception]) -> None:
        """Swap the claimed spare row with the row, once it is ready; raises the error of its reset."""
        if row in self._open:  # its step raised: abandon it here, not in the thread that resets spares
            try:
                self.drop_step([row])
            except Exception:  # the claimed spare row would be lost
                log.warning("row %d: drop_step", row, exc_info=True)
        with self.changed:
            # No timeout: if the reset hangs, supervision ends this call as it would end the reset.
            self.changed.wait_for(lambda: spare.ready)
            assert spare.start == start, f"row {row} begins {start}, but its spare row was reset for {spare.start}"
            error, spare.error, spare.start, spare.claimed = spare.error, None, None, False
            spare.row, self._place[row] = int(self._place[row]), spare.row
            self.changed.notify_all()
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        errors = error.errors if isinstance(error, RowsFailed) else {}
        failed[row] = next(iter(errors.values()), error)

    def _prepare_all(self) -> None:
        """Consumes: forecasts. Waits for: a wanted episode that no spare row has, and a free spare row. Unblocked by:
        `prepare`, `reset`, `close`. Produces: spare rows that are ready."""
        while (work := self._next()) is not None:
            spare, (task, seed) = work
            error: BaseException | None = None
            try:
                self.inner.reset([spare.row], [task], [seed])
                if self._prepares_observations:
                    self.inner.prepare_observation(spare.row)
            except BaseException as raised:  # noqa: BLE001 - it is raised where the episode begins
                error = raised
            with self.changed:
                spare.error, spare.ready = error, True
                self.changed.notify_all()

    def _next(self) -> tuple[_Spare, Start] | None:
        """Wait for a spare row and an episode to reset it for, and mark it; None when closed."""
        with self.changed:
            while not self._closed:
                if found := self._choose():
                    spare, start = found
                    spare.start, spare.ready, spare.error = start, False, None
                    return found
                self.changed.wait()
        return None

    def _choose(self) -> tuple[_Spare, Start] | None:
        """The first wanted episode that no spare row has, and a spare row whose episode is not needed."""
        wanted, kept, free = Counter(self._wanted), Counter(self._kept), []
        for spare in self.spares:
            if spare.claimed:
                continue
            if spare.start is not None and kept[spare.start]:
                kept[spare.start] -= 1
            elif spare.start is not None and wanted[spare.start]:
                wanted[spare.start] -= 1
            else:
                free.append(spare)
        missing = next((start for start in self._wanted if wanted[start]), None)
        able = sorted((spare for spare in free if spare.ready), key=lambda spare: spare.start is not None)
        return None if missing is None or not able else (able[0], missing)
