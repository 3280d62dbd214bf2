"""Profiles with plain numbers, for tests."""

from __future__ import annotations

from polyrhythm.plugins.planning.arrangement import Demand, Nodes
from polyrhythm.plugins.planning.profile import Episodes, Machine, Profile, StationProfile, Timing, Work
from polyrhythm.scheduler.settings import SchedulerSettings

GB = 10**9


def work(*points: tuple[float, ...]) -> Work:
    """Points are amount, seconds and bytes, in any number of them."""
    return Work(
        timings=tuple(
            Timing(
                amount=int(amount),
                count=10,
                mean_s=seconds,
                median_s=seconds,
                p90_s=seconds,
                p99_s=seconds,
                memory=int(memory[0] if memory else 0),
            )
            for amount, seconds, *memory in points
        )
    )


def profile(
    *,
    step: tuple[tuple[float, ...], ...] = ((1, 0.02), (8, 0.1)),
    passes: tuple[tuple[float, ...], ...] = ((1, 0.06), (64, 0.4, 4 * GB)),
    micro_batch: tuple[tuple[float, ...], ...] = ((8, 0.1, 8 * GB), (32, 0.4, 30 * GB)),
    simulators_on: str = "cpu",
    chunk_steps: float = 20,
    deviation: float = 0.0,
    devices: int = 8,
) -> Profile:
    """A simulator, a generator of 7 GB and a trainer of 40 GB, on a machine of 16 cores and 80 GB devices."""
    return Profile(
        recipe="test",
        settings="",
        date="2026-11-28",
        machine=Machine(cores=16, memory=500 * GB, devices=devices, device="test", device_memory=80 * GB),
        episodes=Episodes(mean=chunk_steps, deviation=deviation, longest=int(4 * chunk_steps), chunk=5),
        weights=6 * GB,
        stations={
            "simulator": StationProfile(
                device=simulators_on, works={"step": work(*step), "reset": work((1, 0.1))}, resident=GB
            ),
            "generator": StationProfile(
                device="cuda",
                resident=7 * GB,
                works={"pass": work(*passes), "apply": work((6 * GB, 0.3)), "offload": work((7 * GB, 0.3))},
            ),
            "trainer": StationProfile(
                device="cuda",
                resident=40 * GB,
                works={
                    "micro_batch": work(*micro_batch),
                    "optimizer_step": work((0, 0.1)),
                    "stage": work((6 * GB, 0.3)),
                    "offload": work((40 * GB, 1.6)),
                },
            ),
        },
    )


def demand(*, rows: int = 32, batch_size: int = 16, max_lag: float = 1.0, minibatch_steps: int = 160) -> Demand:
    return Demand(SchedulerSettings(batch_size=batch_size, max_lag=max_lag), rows, minibatch_steps=minibatch_steps)


def nodes(*devices: int) -> Nodes:
    return Nodes(devices, 16, 500 * GB, 80 * GB)
