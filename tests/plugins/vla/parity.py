"""Compares our networks with golden data of the reference implementations, intermediate by intermediate.

    python tests/plugins/vla/parity.py DIR...

A directory has config.json, weights.safetensors, inputs.npz and outputs.npz. Every array of outputs.npz is compared;
the largest absolute error must stay below 1e-5: for velocities, logits and actions as it is, elsewhere times the root
mean square of the array if that exceeds 1 (the golden float32 arrays are themselves up to 1.4e-5 away from the same
computation in float64). Norms of gradients: relative if they exceed 1. The exit code is 1 if any array fails or is
missing.

An architecture's module `parity_NAME` has `compute(folder) -> dict[str, np.ndarray]`, by the names of outputs.npz, and
may have `masks(folder) -> dict[str, np.ndarray]`: bool arrays over the leading axes, true where an array counts; and
`STRICT`, where other arrays than usual have the plain tolerance.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

TOLERANCE = 1e-5
#: Parts of the names of arrays to which the tolerance applies as it is.
STRICT = ("velocity", "_v", "actions", "logits", "values")
#: `type` or `model_type` of config.json -> the module beside this one.
MODULES = {
    "pi0": "parity_pi0",
    "pi05": "parity_pi0",
    "openvla": "parity_openvla_oft",
    "openvla_oft": "parity_openvla_oft",
    "gr00t_n1_5": "parity_groot_n1d5",
    "groot_n1d5": "parity_groot_n1d5",
    "preprocess": "parity_preprocess",
}


@dataclass(frozen=True)
class Line:
    """The comparison of one array. error: largest absolute difference, inf if shapes or names differ; scale: what
    1e-5 is multiplied by."""

    name: str
    error: float
    note: str = ""
    scale: float = 1.0

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE * self.scale

    def __str__(self) -> str:
        note = f"  {self.note}" if self.note else ""
        return f"  {self.name:<56} {self.error:9.2e}  {'ok' if self.ok else 'FAIL'}{note}"


def module_of(folder: Path) -> ModuleType:
    """The module of the folder's architecture. ValueError: unknown, or its module is missing."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {"type": "preprocess"}
    kind = next((config[key] for key in ("type", "model_type", "architecture") if config.get(key) in MODULES), None)
    if kind is None:
        signs = {"gr00t": "groot_n1d5", "openvla": "openvla_oft", "dinosiglip": "openvla_oft"}
        kind = next((signs[sign] for sign in signs if sign in json.dumps(config).lower()), "")
    if kind not in MODULES:
        raise ValueError(f"{folder}/config.json names no known architecture; known are {', '.join(MODULES)}")
    sys.path.insert(0, str(Path(__file__).parents[3]))
    try:
        return importlib.import_module(f"tests.plugins.vla.{MODULES[kind]}")
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder} is a {kind}: tests/plugins/vla/{MODULES[kind]}.py is missing ({error})") from error
    finally:
        sys.path.pop(0)


def compare(folder: Path) -> list[Line]:
    """A line for each array of outputs.npz, in its order."""
    module = module_of(folder)
    found = module.compute(folder)
    masks = module.masks(folder) if hasattr(module, "masks") else {}
    with np.load(folder / "outputs.npz") as golden:
        arrays = {name: golden[name] for name in golden.files}
    found = found | {name: x for name in arrays if (x := in_golden_order(name, arrays, found)) is not None}
    strict = getattr(module, "STRICT", STRICT)
    return [compared(name, array, found.get(name), masks.get(name), strict) for name, array in arrays.items()]


def in_golden_order(name: str, golden: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Norms listed beside names (X_norms, X_names), by the golden names; NaN for a name that we do not have."""
    names = name.removesuffix("_norms") + "_names"
    if names == name or not name.endswith("_norms") or names not in found or name not in found:
        return None
    ours = dict(zip(found[names].tolist(), found[name].tolist(), strict=True))
    return np.array([ours.get(key, np.nan) for key in golden[names].tolist()])


def compared(
    name: str,
    golden: np.ndarray,
    found: np.ndarray | None,
    mask: np.ndarray | None,
    strict_parts: tuple[str, ...] = STRICT,
) -> Line:
    """One array against ours."""
    if found is None:
        return Line(name, float("inf"), "not computed")
    if golden.shape != found.shape:
        return Line(name, float("inf"), f"shape {found.shape}, golden {golden.shape}")
    if golden.dtype.kind in "USO":
        unlike = set(golden.ravel().tolist()) ^ set(np.asarray(found).ravel().tolist())
        return Line(name, float("inf") if unlike else 0.0, f"differ in {sorted(unlike)[:3]}" if unlike else "names")
    note = ""
    if mask is not None:
        golden, found, note = golden[mask], found[mask], "where the mask is true"
    if golden.dtype == bool:
        return Line(name, float("inf") if (golden != found).any() else 0.0, note)
    strict = golden.dtype.kind != "f" or any(part in name for part in strict_parts)
    return _numbers(name, golden.astype(np.float64), np.asarray(found, np.float64), note, strict)


def _numbers(name: str, golden: np.ndarray, found: np.ndarray, note: str, strict: bool) -> Line:
    difference, scale = np.abs(golden - found), 1.0
    if "grad_" in name and not strict:  # norms reach hundreds
        difference, note = difference / np.maximum(golden, 1.0), "relative above 1"
    elif not strict and golden.size:
        scale = max(1.0, float(np.sqrt(np.square(golden).mean())))
        note = note or (f"limit {TOLERANCE * scale:.1e}" if scale > 1.0 else "")
    error = difference.max(initial=0.0)
    return Line(name, float("inf") if np.isnan(error) else float(error), note, scale)


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")


def main(folders: list[str]) -> int:
    if not folders:
        say(__doc__)
        return 2
    failed = 0
    for folder in map(Path, folders):
        say(folder)
        try:
            lines = compare(folder)
        except ValueError as error:
            say(f"  {error}")
            failed += 1
            continue
        for line in lines:
            say(line)
        failing = [line for line in lines if not line.ok]
        failed += len(failing)
        say(f"  {len(lines) - len(failing)} of {len(lines)} arrays agree to {TOLERANCE:g}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Matrix products that round alike on every processor: with those of some, GR00T's time embedding alone is 6e-6 away
    # from that of others, and what comes of it 1.2e-5. MKL reads this at its first product.
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    sys.exit(main(sys.argv[1:]))
