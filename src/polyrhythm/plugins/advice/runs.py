"""The findings of a run that is read from its folder."""

from __future__ import annotations

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.observe.run_folder import CONFIG_FILE
from polyrhythm.plugins.advice.findings import Finding
from polyrhythm.plugins.advice.measures import newest_utilisation
from polyrhythm.plugins.advice.order import advice
from polyrhythm.plugins.report.read import Run


def findings_of(run: Run) -> list[Finding]:
    """Advice from the run's files; empty if it did not train, or this version does not know its settings."""
    try:
        config = load_config(run.folder / CONFIG_FILE)
    except ConfigError:
        return []
    utilisation = run.summary.get("utilisation") or newest_utilisation(run.updates[-1] if run.updates else {})
    return advice(config, utilisation, run.updates, run.alarms)
