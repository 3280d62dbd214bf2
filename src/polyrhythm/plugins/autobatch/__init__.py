"""`batching: auto`: chooses the batch limits of `dynamic` from measured times, by forecasting candidates.

timing      how long passes take and slots are away, as the conductor hears it
snapshot    the present state of slots and generators, as a closed loop
forecast    rows per second of that loop under given limits
candidates  the limits that are compared
search      forecasts of all candidates, in slices
rates       rates that were measured, which correct the forecasts
tuning      when a search begins, and which candidate is taken: begin reading here
"""
