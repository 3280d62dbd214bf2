"""`batching: auto`: chooses the batch limits of `dynamic` from measured times, by forecasting candidates.

timing      how long passes take and slots are away, as the conductor hears it
forecast    the present state as a closed loop, and its rows per second under given limits
search      the limits that are compared, and forecasts of all of them, in slices
rates       rates that were measured, which correct the forecasts
tuning      when a search begins, and which candidate is taken: begin reading here
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "autobatch",
    adds={"scheduler": {"tuner": "polyrhythm.plugins.autobatch.tuning:BatchTuner"}},
)
