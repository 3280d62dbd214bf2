"""Our preprocessing by the names of the golden arrays, for `parity.py`.

A folder has norm_stats.json (openpi's statistics, and GR00T's under `groot`) and arrays of images, states and actions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyrhythm.plugins.vla import images, scaling, statistics
from polyrhythm.plugins.vla.openvla_oft.policy import centres, rows_of
from polyrhythm.plugins.vla.prompts import state_bins
from polyrhythm.plugins.vla.scaling import Scaler, Scaling, switches

#: OpenVLA's token ids of actions: rows and size of the vocabulary without padding.
_BINS, _IDS = 256, 32000


def compute(folder: Path) -> dict[str, np.ndarray]:
    """Every array of outputs.npz, from inputs.npz and norm_stats.json."""
    with np.load(folder / "inputs.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    found = _images(given) | _openpi(folder, given) | _groot(folder, given) | _openvla(given)
    return {name: tensor.numpy() for name, tensor in found.items()}


def _images(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "openpi_client_resize_with_pad_56": images.resize_with_pad(given["image_uint8"], 56, 56),
        "openpi_client_resize_with_pad_56_tall": images.resize_with_pad(given["image_uint8_tall"], 56, 56),
        "openpi_model_input_56": images.pi0_images(given["image_uint8"], 56),
        "openpi_torch_resize_with_pad_42_float": images.interpolated(
            given["image_float"].permute(0, 3, 1, 2), 42, 42, -1.0, centred=True
        ).permute(0, 2, 3, 1),
    }


def _openpi(folder: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"pi05_state_bins": state_bins(given["pi05_normalized_state"])}
    for kind, method in (("pi0", "meanstd"), ("pi05", "quantile")):
        robot = statistics.openpi(folder / "norm_stats.json", kind, "")
        assert robot.state is not None
        assert robot.actions is not None
        state, actions = Scaler(robot.state), Scaler(robot.actions)
        found |= {
            f"f64_openpi_state_{method}": state.normalise(given["raw_state"]),
            f"f64_openpi_actions_{method}": actions.normalise(given["raw_actions"]),
            f"f64_openpi_unnormalized_actions_{method}": actions.unnormalise(given["model_actions_padded"]),
        }
    return found


def _groot(folder: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    stats = {
        name: np.array(values) for name, values in json.loads((folder / "norm_stats.json").read_text())["groot"].items()
    }
    scalings: dict[str, Scaling] = {
        "q99": scaling.bounds(stats["q01"], stats["q99"], constant="keep", clipped=True),
        "mean_std": scaling.mean_std(stats["mean"], stats["std"], eps=0.0, constant="keep"),
        "min_max": scaling.bounds(stats["min"], stats["max"], method="min_max", constant="zero"),
        "binary": switches(len(stats["min"])),
    }
    found = {}
    for name, one in scalings.items():
        scaler = Scaler(one)
        found[f"groot_{name}_normalized"] = scaler.normalise(given["groot_x"]).float()
        found[f"groot_{name}_inverse"] = scaler.unnormalise(given["groot_x"]).float()
    return found


def _openvla(given: dict[str, Tensor]) -> dict[str, Tensor]:
    first = _IDS - _BINS
    return {
        "oft_action_token_ids": rows_of(given["oft_actions"], _BINS) + first,
        "f64_oft_decoded_actions": centres(_BINS, torch.float64)[rows_of_ids(given["oft_token_ids"], first, _BINS)],
    }


def rows_of_ids(ids: Tensor, first: int, bins: int) -> Tensor:
    """Rows of token ids, given the id of row 0: [...] -> int64 [...]. Ids outside are clamped to the nearest."""
    return (ids - first).clamp(0, bins - 1)
