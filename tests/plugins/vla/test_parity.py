"""Our networks agree with the golden data of the reference implementations, and `parity.py` notices if they do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import long
from tests.plugins.vla import parity
from torch import Tensor

from polyrhythm.policies.flow_matching import Ode

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(config.parent for config in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(one, id=one.name, marks=long(2, "pi05 beside its reference") if one.name == "pi05" else ())
        for one in FOLDERS
    ],
)
def test_every_array_agrees(folder: Path) -> None:
    """In a process of its own, whose matrix products round as on other processors."""
    command = [sys.executable, parity.__file__, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [line for line in lines if "FAIL" in line] == [], done.stderr
    assert done.returncode == 0
    assert len(lines) > 30


@pytest.mark.parametrize("name", ["pi0", "pi05", "gr00t_n1_5"])
def test_our_ode_with_four_steps_is_the_references(name: str) -> None:
    """The sampler that policies use, not the reference's loop in `parity_NAME`: at K = 4 their times are equal."""
    module: Any = parity.module_of(GOLDEN / name)
    network, inputs = module.load(GOLDEN / name), module.inputs_of(GOLDEN / name)
    inputs = inputs[0] if isinstance(inputs, tuple) else inputs
    start, states = inputs["noise"], []
    with torch.no_grad():
        prefix = network.prefix(inputs)

        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, None]:
            states.append(x)
            return network.velocity(prefix, inputs, x, t)[0], None

        rows = torch.zeros(len(start), dtype=torch.int64)
        actions, _ = Ode().sample(velocity, 4, start, rows.bool(), rows)
    with np.load(GOLDEN / name / "outputs.npz") as golden:
        np.testing.assert_allclose(torch.stack([*states, actions]).numpy(), golden["ode4_x"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(actions.numpy(), golden["ode4_actions"], rtol=0, atol=1e-5)


def test_one_changed_number_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pi0"
    shutil.copytree(GOLDEN / "pi0", folder)
    arrays = dict(np.load(folder / "outputs.npz"))
    arrays["velocity"][1, 2, 3] += 2e-5
    arrays["prefix_position_ids"][0, 5] += 1
    arrays["prefix_attention_2d"][0, 5, 5] ^= True
    arrays["grad_none_names"] = arrays["grad_none_names"][1:]
    arrays["grad_param_norms"][3] *= 1.001
    np.savez(folder / "outputs.npz", **arrays, another=np.zeros(2, np.float32))
    assert parity.main([str(folder)]) == 1
    failing = {line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line}
    changed = {"velocity", "prefix_position_ids", "prefix_attention_2d", "grad_none_names", "grad_param_norms"}
    assert failing == changed | {"another"}


def test_a_folder_of_an_unknown_architecture_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    assert parity.main([str(tmp_path)]) == 1
    assert "names no known architecture" in capsys.readouterr().out
