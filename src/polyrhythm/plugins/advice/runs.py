"""The findings of a run that is read from its folder."""

from __future__ import annotations

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.observe.run_folder import CONFIG_FILE
from polyrhythm.plugins.advice.findings import Finding, from_json
from polyrhythm.plugins.advice.measures import newest_utilisation
from polyrhythm.plugins.advice.order import advice
from polyrhythm.plugins.report.read import Run


def findings_of(run: Run, predict_s: float = 0.0) -> list[Finding]:
    """Advice from the run's files; empty if it did not train, or this version does not know its settings.

    predict_s: seconds that predictions may take; without any, those of the summary.
    """
    if not predict_s and "advice" in run.summary:
        return from_json(run.summary["advice"])
    try:
        config = load_config(run.folder / CONFIG_FILE)
    except ConfigError:
        return []
    utilisation = run.summary.get("utilisation") or newest_utilisation(run.updates[-1] if run.updates else {})
    found = advice(config, utilisation, run.updates, run.alarms)
    if not predict_s or not run.finished:
        return found
    from polyrhythm.plugins.advice.predicted import Predictor  # the simulated cluster, which a report may not need

    return Predictor(config, run.summary, run.updates, predict_s).predict(found)
