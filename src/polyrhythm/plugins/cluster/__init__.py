"""A run on several hosts: agents, sealed connections, Ray, and jobs of a cluster's queue."""

from polyrhythm.checks import Check, CheckContext
from polyrhythm.plugin import Plugin


def _ray(context: CheckContext) -> tuple[()]:
    """Whether the run's Ray cluster answers; its devices are then counted anew."""
    if context.config.launcher == "ray":
        from polyrhythm.plugins.cluster.ray.inventory import forget
        from polyrhythm.plugins.cluster.ray.reach import check_launcher

        forget()
        check_launcher(context.config)
    return ()


CHECKS = (Check("launcher", "recipe", "settings", _ray),)
PLUGIN = Plugin(
    "cluster",
    needs=("ranks", "report"),
    adds={
        "command": {"train --slurm": "polyrhythm.plugins.cluster.submit.command"},
        "check": {"launcher": "polyrhythm.plugins.cluster:CHECKS"},
        "report": {"hosts": "polyrhythm.plugins.cluster.report_section:SECTION"},
        "devices": {"ray": "polyrhythm.plugins.cluster.ray.inventory:find_devices"},
        "launcher": {"ray": "polyrhythm.plugins.cluster.launching:launch_on_ray"},
    },
)
