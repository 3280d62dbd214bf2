"""The scheduler on a simulated cluster in virtual time, and planning from measured stage times."""
