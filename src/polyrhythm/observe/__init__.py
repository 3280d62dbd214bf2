"""Output of a run: metrics, traces, utilisation, confidence intervals and the run folder. Imports no torch."""

from polyrhythm.observe.activity import Activity, Utilisation
from polyrhythm.observe.intervals import Interval, wilson
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import new_run_folder, take_folder
from polyrhythm.observe.trace import TraceWriter

__all__ = [
    "Activity",
    "Interval",
    "MetricsWriter",
    "TraceWriter",
    "Utilisation",
    "new_run_folder",
    "take_folder",
    "wilson",
]
