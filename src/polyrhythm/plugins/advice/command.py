"""`polyrhythm plan RUN`: prints the advice about a run."""

from __future__ import annotations

import json
from pathlib import Path

from polyrhythm.errors import RunFolderError
from polyrhythm.observe.run_folder import find_run
from polyrhythm.plugins.advice.findings import in_words
from polyrhythm.plugins.advice.runs import findings_of
from polyrhythm.plugins.report.read import read_run

#: Seconds that predictions may take, about.
_PREDICT_S = 5.0


def print_advice(folder: str, *, as_json: bool) -> None:
    """RunFolderError: there is no run, or it did not train."""
    run = read_run(find_run(Path(folder)))
    found = findings_of(run, _PREDICT_S)
    if not found:
        raise RunFolderError(
            f"{str(run.folder)!r} has no advice: the run trained nothing, or this version does not know its settings; "
            "name a run that trained"
        )
    if as_json:
        print(json.dumps({"advice": [finding.as_json() for finding in found]}, indent=2))
    else:
        print("\n".join(in_words(found)))
