"""Generator and trainer in one process (`placement.sharing: process`), whose kernels run side by side on one device.

The trainer's work is on CUDA's default stream, the generator's on one of higher priority, so that a pass does not wait
for an update. Each station keeps its thread, sockets and messages (`runtime.processes.child.run_stations`); weights
are copied from the publication in the process's own device memory. On a CPU there are no streams, all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import SharedSeats
from polyrhythm.runtime.devices import CUDA
from polyrhythm.runtime.factories import Resources, StationContext, StationFactory
from polyrhythm.runtime.messages import TRAINER, Station, station_of

#: Makes the generator's parts (`Resources.wrapper`).
URGENT_PARTS = "polyrhythm.plugins.sharing.streams:urgent_parts"
#: Of CUDA's streams: the lower, the more urgent; the default stream has 0.
_PRIORITY = -1


def share_seats(
    placement: PlacementSettings,  # noqa: ARG001 - of every way of sharing
    seats: Mapping[str, Resources],
    *,
    simulators_leave: bool,  # noqa: ARG001
    offload: str,  # noqa: ARG001
) -> SharedSeats:
    """The seats with one process for generator and trainer, with the larger number of threads. ConfigError: there is
    another generator or rank, or they are on two devices."""
    ranks = [name for name in seats if station_of(name) == TRAINER]
    generators = [name for name in seats if name.startswith("generator")]
    if not ranks:  # an evaluation
        return SharedSeats(seats)
    if len(ranks) > 1 or len(generators) > 1:
        raise ConfigError(
            f"placement.sharing = process: there are {len(generators)} generators and {len(ranks)} ranks of the "
            "trainer, and one process takes one of each; set rollout.generators and placement.trainer.ranks to 1 "
            "without a generator for evaluations alone, or sharing to share or mps"
        )
    (generator,), (trainer,) = generators, ranks
    if seats[generator].device != seats[trainer].device:
        raise ConfigError(
            f"placement.sharing = process: the generator is on {seats[generator].device}, the trainer on "
            f"{seats[trainer].device}; place both on one device, or set sharing to share"
        )
    threads = max(seats[generator].threads, seats[trainer].threads)
    own = {name: replace(seats[name], process=TRAINER, threads=threads) for name in (generator, trainer)}
    own[generator] = replace(own[generator], wrapper=URGENT_PARTS)
    return SharedSeats({**seats, **own})


def urgent_parts(
    factory: StationFactory,
    context: StationContext,
    incarnation: int,
    resources: Resources,  # noqa: ARG001 - as of every wrapper
) -> Sequence[tuple[str, Callable[[], Station]]]:
    """The station's parts, each of which computes on an urgent stream of its own."""
    parts = factory.parts(context, incarnation)
    return [(address, partial(_make_on_stream, make, context.device)) for address, make in parts]


def _make_on_stream(make: Callable[[], Station], device: str) -> Station:
    """In the thread in which the part is made and works."""
    if device.startswith(CUDA):
        import torch

        torch.cuda.set_stream(torch.cuda.Stream(device, priority=_PRIORITY))
    return make()
