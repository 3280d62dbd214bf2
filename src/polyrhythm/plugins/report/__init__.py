"""The HTML report on a run, or the comparison of several."""
