"""How much memory a run takes on each device, before it is started."""
