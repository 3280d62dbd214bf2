"""Whether the launcher can have what the settings ask of it."""

from __future__ import annotations

import importlib.util

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, MissingError, StartError, install_command
from polyrhythm.plugins.cluster.ray.reach import check_reachable

_KINDS = ("simulators", "generators", "trainer", "scorers")


def check_launcher(config: RunConfig) -> None:
    """ConfigError, with a problem for each setting, for what a run on a Ray cluster cannot have; MissingError if Ray is
    not installed, or no cluster answers at the address."""
    if config.launcher != "ray":
        return
    placement = config.placement
    problems = [
        f"placement.{kind}.devices = {devices}: with launcher = ray stations work on CPUs; set it to cpu, or launcher "
        "to local"
        for kind in _KINDS
        if (devices := getattr(placement, kind).devices) not in (None, "cpu")
    ]
    if placement.preset is not None:
        problems.append(
            f"placement.preset = {placement.preset}: with launcher = ray stations work on CPUs; write placement=null, "
            "or set launcher to local"
        )
    if placement.sharing == "lease":
        problems.append(
            "placement.sharing = lease: with launcher = ray stations work on CPUs, which are shared; set it to share"
        )
    if problems:
        raise ConfigError(*problems)
    check_ray_installed()
    try:
        check_reachable(config.ray.address)
    except StartError as error:
        raise MissingError(str(error)) from error


def check_ray_installed() -> None:
    """MissingError: it is not."""
    if importlib.util.find_spec("ray") is None:
        command = install_command("ray")
        raise MissingError(f"launcher = ray: the package ray is not installed; install it: {command}")
