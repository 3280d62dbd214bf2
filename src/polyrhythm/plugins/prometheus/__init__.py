"""A run's current numbers for Prometheus, over HTTP."""

from polyrhythm.checks import Check, CheckContext
from polyrhythm.plugin import Plugin


def _port(context: CheckContext) -> str | tuple[()]:
    """Open and close the endpoint, to raise its errors before anything starts."""
    if context.config.prometheus.port is None or not context.trainer:
        return ()
    from polyrhythm.plugins.prometheus.endpoint import check_endpoint

    check_endpoint(context.config.prometheus)
    return ""


CHECKS = (Check("prometheus", "recipe", "trial", _port),)
PLUGIN = Plugin(
    "prometheus",
    adds={
        "check": {
            "prometheus": "polyrhythm.plugins.prometheus:CHECKS",
        },
        "observer": {
            "prometheus": "polyrhythm.plugins.prometheus.endpoint:HOOKS",
        },
    },
)
