"""Output of a run: metrics, utilisation, confidence intervals and the run folder. Imports no torch."""

from polyrhythm.observe.activity import Activity, Utilisation
from polyrhythm.observe.intervals import Interval, wilson
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import new_run_folder, take_folder

__all__ = [
    "Activity",
    "Interval",
    "MetricsWriter",
    "Utilisation",
    "new_run_folder",
    "take_folder",
    "wilson",
]
