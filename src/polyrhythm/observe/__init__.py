"""Output of a run: metrics, utilisation, confidence intervals and the run folder. Imports no torch."""
