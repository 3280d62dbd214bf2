"""A run on several hosts: agents, sealed connections, Ray, and jobs of a cluster's queue."""

from contextlib import suppress

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import MissingError
from polyrhythm.plugin import Plugin


def _ray(context: CheckContext) -> tuple[()]:
    """Whether the run's Ray cluster answers; its devices are then counted anew."""
    if context.config.launcher == "ray":
        from polyrhythm.plugins.cluster.ray.inventory import forget
        from polyrhythm.plugins.cluster.ray.reach import check_launcher

        forget()
        check_launcher(context.config, starts=context.depth == "trial")
    return ()


def _room(context: CheckContext) -> tuple[()]:
    """Whether the cluster has enough CPUs. Too few devices are reported by the core's check of them."""
    config = context.config
    if config.launcher == "ray" and config.ray.address != "local":
        from polyrhythm.pipeline.placed import joined_names, place
        from polyrhythm.plugins.cluster.ray.inventory import count_cpus
        from polyrhythm.plugins.cluster.ray.reach import bundles_of, check_room

        with suppress(MissingError):
            seats = place(config, trainer=context.trainer).seats
            own = {name: seat for name, seat in seats.items() if name not in joined_names(config)}
            check_room(bundles_of(own, each := config.ray.cpus_per_station), each, count_cpus(config.ray.address))
    return ()


CHECKS = (
    Check("launcher", "recipe", "settings", _ray),
    Check("room on the cluster", "recipe", "settings", _room, after="devices"),
)
PLUGIN = Plugin(
    "cluster",
    needs=("ranks", "report"),
    adds={
        "command": {
            "train --slurm": "polyrhythm.plugins.cluster.submit.command",
            "cluster": "polyrhythm.plugins.cluster.command",
        },
        "check": {"launcher": "polyrhythm.plugins.cluster:CHECKS"},
        "report": {"hosts": "polyrhythm.plugins.cluster.report_section:SECTION"},
        "devices": {"ray": "polyrhythm.plugins.cluster.ray.inventory:find_devices"},
        "launcher": {"ray": "polyrhythm.plugins.cluster.launching:launch_on_ray"},
    },
    purposes={"cluster": "describe a Ray cluster in a file, for checks and plans without it"},
)
