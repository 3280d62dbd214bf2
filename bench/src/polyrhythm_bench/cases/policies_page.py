"""Writes the page from the result of `polyrhythm bench policies --json`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm_bench.cases import policies, prefixes
from polyrhythm_bench.harness.markdown import wrap_prose

PAGE = "policies.md"
_HEAD = """# The published policies beside plain forward passes

By `polyrhythm bench policies --json > policies.json` and `python bench/scripts/policies_table.py policies.json`,
{date}; torch {torch} on {device}, {threads} thread(s), {cores} cores, of which other work took {others_cores:.1f}
meanwhile.{clock} [What is counted](../../docs/design/measuring-and-planning.md#benchmarks). Random weights; {cameras}
cameras, {chunk} actions a chunk, {steps} denoise steps; medians of {repeats} interleaved turns.

- *ratio*: our time over that of the reference, a plain forward pass with transformers' modules of the same sizes, in
  the same turn. Below 1 ours is faster.
- *of roofline*: the least time that the device allows for the counted flops, or for reading the weights once, over the
  time; the peaks are a matrix product and a copy measured in the same run.
- *memory*: most of the tensors that a pass allocates and that live at a time, without the weights.
- *train*: forward and backward of `evaluate` with the sum of its outputs as the loss.
"""
_PART = """
## {name}

{parameters_m:.1f}M parameters in {dtype}; peaks: {peak_tflops:.3g} TFLOP/s, {peak_gb_per_s:.3g} GB/s.{nearest}

| pass, rows | ours, ms | reference, ms | ratio | actions/s | GFLOP, ours / reference | of roofline | memory, MB |
|---|---|---|---|---|---|---|---|
{rows}

{weights}

An update with `train: {frozen}` ([how](frozen_prefix.md)); weights differ by at most {difference:.1g} between the last
two ways:

{updates}
"""


def write(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page into the folder; the path. found: the content of the JSON output."""
    given = {name: value for name, value in found.items() if name != "parts"}
    text = _HEAD.format(date=datetime.now(UTC).date(), clock=_clock(found), **given)
    text += "".join(_part(name, part) for name, part in found["parts"].items())
    if found["left_out"]:
        text += "\n## Not run\n\n" + "\n".join(f"- {sentence}." for sentence in found["left_out"]) + "\n"
    path = folder / PAGE
    path.write_text(wrap_prose(text), encoding="utf-8")
    return [path]


def _clock(found: Mapping[str, Any]) -> str:
    if found["device"] != "a CPU" or found["threads"] > 1:
        return ""
    return " Times are CPU times of the one thread, so what waited for a core does not count."


def _part(name: str, part: Mapping[str, Any]) -> str:
    nearest = f" The reference: {part['nearest']}." if part["nearest"] else ""
    rows = "\n".join(_row(mode, values) for mode, values in part["modes"].items())
    updates, frozen = part["updates"], policies.FROZEN[name.partition(",")[0]]
    said = {"updates": prefixes.table([updates]), "difference": updates["largest_difference"], "frozen": frozen}
    return _PART.format(name=name, nearest=nearest, rows=rows, weights=_weights(part), **said, **_numbers(part))


def _numbers(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part[key] for key in ("parameters_m", "dtype", "peak_tflops", "peak_gb_per_s")}


def _row(mode: str, values: Mapping[str, Any]) -> str:
    captured = values.get("captured_ms")
    ours = f"{values['ms']:.1f}" + (f" (captured {captured:.1f})" if captured else "")
    cells = [
        mode.replace(" ", ", "),
        ours,
        f"{values['reference_ms']:.1f}",
        f"**{values['ratio']:.2f}**",
        f"{values['actions_per_s']:,.0f}",
        f"{values['gflop']:.3g} / {values['reference_gflop']:.3g}",
        f"{values['of_roofline']:.2f}",
        f"{values['peak_mb']:.1f} / {values['reference_peak_mb']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _weights(part: Mapping[str, Any]) -> str:
    if left_out := part.get("weights_left_out"):
        return f"Weights: not measured, {left_out}."
    direct = part.get("weights_direct_ms")
    said = (
        f"Weights, {part['weights_mb']:.1f} MB: published in {part['weights_publish_ms']:.2f} ms, staged in "
        f"{part['weights_stage_ms']:.2f}, applied from there in {part['weights_apply_ms']:.2f}; `copy_` tensor by "
        f"tensor from the host takes {part['weights_plain_ms']:.2f}. "
    )
    if direct is not None:
        said += f"In host memory, as here, a generator applies without staging: {direct:.2f} ms. "
    return said + f"What passes wait for is {part['weights_apply_ratio']:.2f} times the plain copy."
