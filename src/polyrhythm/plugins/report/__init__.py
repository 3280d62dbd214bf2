"""The HTML report on a run, or the comparison of several."""

from polyrhythm.plugin import Plugin

_COMMAND = f"{__name__}.command"
PLUGIN = Plugin(
    "report",
    adds={"observer": {"report": f"{_COMMAND}:HOOKS"}, "command": {"report": _COMMAND}},
    purposes={"report": "write an HTML report of a run, or a comparison of several"},
)
