"""`batching: auto`: chooses the batch limits of `dynamic` from measured times, by forecasting candidates.

timing      measured times of passes and of slots' absences
forecast    the present state as a closed loop, and its rows per second under given limits
search      the candidate limits, forecasts of all of them, in slices, and measured rates that correct these
tuning      when a search begins, and which candidate is chosen: begin reading here
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "autobatch",
    adds={"scheduler": {"tuner": "polyrhythm.plugins.autobatch.tuning:BatchTuner"}},
)
