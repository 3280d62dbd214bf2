"""The trainer's work beside its steps: fetching samples from other hosts, and publishing weights.

All samples of an update are fetched together within the trainer's work, so that supervision limits the time and several
transfers overlap. A publication runs at once or in a thread, beside the update that follows.

A sharded trainer whose ranks on rank 0's host have every row between them publishes together: each rank copies its rows
into that host's memory, and nothing is gathered. Ranks of other hosts write nothing; where only they have a row, rank 0
publishes tensor by tensor what all ranks gather.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.tensors import check_fit
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.runtime.messages import Unobeyable
from polyrhythm.scheduler.records import StartUpdate
from polyrhythm.training.learner import Learner

#: Tickets that an error names.
_NAMED = 8


class FarSamples:
    """Updates whose samples on other hosts are still to be fetched; falsy if there are none. Of several ranks each
    fetches the observations of its own samples alone; how these are dealt depends on all of them."""

    def __init__(self, arena: Arena, learner: Learner) -> None:
        self._arena, self._learner = arena, learner
        self._todo: deque[StartUpdate] = deque()

    def __bool__(self) -> bool:
        return bool(self._todo)

    def could_have(self, update: StartUpdate) -> bool:
        """Whether each sample is in the arena or on another host."""
        places = zip(update.payload_ids, update.tickets, strict=True)
        return all(self._arena.lies_elsewhere(p) or self._arena.has(p, ticket) for p, ticket in places)

    def add(self, update: StartUpdate) -> None:
        """Queue the update if some of its samples are on other hosts."""
        if any(map(self._arena.lies_elsewhere, update.payload_ids)):
            self._todo.append(update)

    def fetch_next(self) -> None:
        """Fetch the samples of the next update. Unobeyable: one is missing, or its host does not answer."""
        update, ranks = self._todo.popleft(), self._learner.ranks
        self._fetch(update, update.payload_ids, obs=ranks.size == 1)
        if ranks.size > 1:
            samples = [self._arena.read(payload_id) for payload_id in update.payload_ids]
            groups, steps = [sample.group for sample in samples], [sample.steps for sample in samples]
            share = ranks.share(groups, steps, self._learner.training.step_samples)
            self._fetch(update, [update.payload_ids[index] for index in share.read], obs=True)

    def _fetch(self, update: StartUpdate, payload_ids: Sequence[str], *, obs: bool) -> None:
        why = ""
        try:
            self._arena.fetch(payload_ids, obs=obs)
        except LookupError as error:
            why = str(error)
        places = zip(update.payload_ids, update.tickets, strict=True)
        lacking = [ticket for payload_id, ticket in places if not self._arena.has(payload_id, ticket)]
        if why or lacking:
            self._todo.clear()
            raise Unobeyable(update, why or f"the samples of tickets {lacking[:_NAMED]} are not there any more")


#: Publishes as this version what was prepared, or these whole tensors if the learner's own may have changed since.
Publish = Callable[[int, Mapping[str, Tensor] | None], None]


class Publisher:
    """Publishes the weights of `learner` by all of its ranks, which make one each, and call it in the same order.

    memory: the name of this process's host, whose memory `weights` is of. overlaps: whether a publication may run in a
    thread beside the next update, as it needs none of the update's collectives.
    """

    def __init__(self, weights: Weights, learner: Learner, memory: str = "") -> None:
        self.learner, self._weights, self.traffic = learner, weights, weights.traffic
        ranks = learner.ranks
        where = f"host {memory}" if weights.shared is not None else ""
        self._together = ranks.divides and ranks.divide_writing(learner.published(), where)
        self.overlaps = self._together or not ranks.divides

    def prepare(self) -> Publish:
        """What publishes the weights that the learner has now, until its next optimizer step."""
        shared = self._weights.shared
        if not self._together:
            return self._publish
        state, ranks = self.learner.published(), self.learner.ranks
        check_fit(self._weights.layout, state, convertible=True)
        pieces = [piece for piece in ranks.pieces(state) if piece.name in self._weights.layout.published]

        def publish(version: int, copied: Mapping[str, Tensor] | None = None) -> None:  # noqa: ARG001
            if shared is None:
                ranks.totals_beside([0])
                ranks.totals_beside([0])
            else:
                shared.publish_pieces(version, pieces, ranks.totals_beside, leads=ranks.rank == 0)

        return publish

    def _publish(self, version: int, copied: Mapping[str, Tensor] | None = None) -> None:
        publish_weights(self._weights, version, self.learner, copied)


def publish_weights(
    weights: Weights, version: int, learner: Learner, copied: Mapping[str, Tensor] | None = None
) -> None:
    """Rank 0 publishes; sharded weights are gathered tensor by tensor by all ranks, and are never whole on any. copied:
    the tensors to publish, if the learner's own may have changed since."""
    if copied is not None:
        weights.publish(version, copied)
        return
    tensors, ranks = learner.publishable(), learner.ranks
    if not ranks.divides:
        if ranks.rank == 0:
            weights.publish(version, dict(tensors))
    elif ranks.rank == 0:
        weights.publish(version, tensors)
    else:
        for _ in tensors:
            pass


class PublicationJob:
    """One publication, run at once or in a thread. begun: its start; lasted: (start, end), once it is over.

    Events that `publish` sets, or the end of the job: read: the learner's tensors are no longer read; saved: the state
    that is due with it is announced.
    """

    def __init__(self, publish: Callable[[PublicationJob], None], version: int, overlap: bool) -> None:
        self._publish, self.version = publish, version
        self.begun, self.lasted = time.monotonic(), (0.0, 0.0)
        self.read, self.saved = threading.Event(), threading.Event()
        self._result = Future[None]()
        if overlap:
            threading.Thread(target=self._run, name="publication", daemon=True).start()
        else:
            self._run()
            self.wait()

    def _run(self) -> None:
        try:
            self._publish(self)
            self.lasted = (self.begun, time.monotonic())
            self._result.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._result.set_exception(error)
        finally:
            self.read.set()
            self.saved.set()

    @property
    def over(self) -> bool:
        return self._result.done()

    def wait_for(self, stage: threading.Event) -> None:
        """Wait until the event is set; raises the job's error."""
        stage.wait()
        if self.over:
            self.wait()

    def wait(self) -> None:
        """Wait until the job is over; raises its error."""
        self._result.result()
