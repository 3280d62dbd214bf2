"""The program of docs/workflows.md, as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.runs import ROOT

TEXT = (ROOT / "docs" / "workflows.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_the_program_of_the_page_prints_what_the_page_says(launcher: str, tmp_path: Path) -> None:
    program, shown = re.findall(r"^```(?:python)?\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[:2]
    script = tmp_path / "squares.py"
    script.write_text(program.replace('Workflow("local")', f"Workflow({launcher!r})"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
