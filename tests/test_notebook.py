"""The notebook of the quickstart runs from its first cell to its last, in a kernel and a folder of its own."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
from tests.long import long

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_its_cells_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with few updates."""
    pytest.importorskip("IPython", reason="the extra dev has ipykernel")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert not cell["outputs"], "commit it without outputs"
        exec("".join(cell["source"]), names)
        if number == 0:
            assert names["VERSIONS"] == 20
            names["VERSIONS"] = 2
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
    assert int(str(names["steps"])) > 0


@pytest.mark.slow
@long(13, "a Jupyter kernel")
@pytest.mark.filterwarnings("default")  # those of Jupyter's packages, none of them ours
def test_the_notebook_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra dev has nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="the extra dev has nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="the extra dev has nbclient and ipykernel")
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    # This Python, whatever kernels the machine has; no history or settings of the user.
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here"}), encoding="utf-8")
    for name in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if output)
    assert "return " in printed
    assert printed.rstrip().endswith("steps"), textwrap.shorten(printed, 400)
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
