"""Writes the page from the result of `polyrhythm bench weights --json`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyrhythm.plugins.cluster.hosts.questions import PART_BYTES
from polyrhythm_bench.harness.markdown import wrap_prose

PAGE = "weights.md"
_HEAD = """# A version of the weights from the trainer to a generator, beside bare copies

By `polyrhythm bench weights --megabytes {megabytes} --repeats {repeats} --json > weights.json` and `python
bench/scripts/weights_table.py weights.json`, {date}; torch {torch}, {threads} thread(s), {cores} cores, of which other
work took {others_cores:.1f} meanwhile; {devices}. {clock}
[design](../../docs/design/memory-and-devices.md#ways-between-devices) says which way is chosen when.

{megabytes} MB in float32, medians of {repeats} turns. *publish*: in the trainer's process; *apply*: in the generator's;
*bare*: the same bytes copied as often into the same kinds of memory, in the same turn; *ratio*: publish and apply over
bare. The aim for shared memory is {limit_ratio}.

| way | publish, ms | apply, ms | bare, ms | ratio | GB/s |
|---|---|---|---|---|---|
{rows}

*streamed*: tensor by tensor, without the time that ranks take to gather a tensor. *simulated*: a file in place of
device memory, so the order of copies and not their speed; a version is written to the device and to the host. *shards*:
each rank of a sharded trainer writes its own rows; *publish* is the rank's that took longest. *gathered*: rank 0
publishes tensor by tensor what it gathers, as where the ranks' rows lie on several hosts; *publish* is rank 0's or the
other's, whichever took longer. The broadcast is there for comparison; no run uses one. *tcp between hosts*: two ends on
this machine that share no memory, over the loopback interface, encrypted, in parts of {part_mb:.1f} MB; *bare* is a
socket without encryption. *pair between hosts*: the same two ends on simulated devices, by gloo and without encryption,
through a staging buffer. The times of both are those of the clock, as the processes that serve and receive the version
take part.

## To several hosts

{tree_megabytes} MB to hosts that are apart by their memories, each with an agent of its own; the cores of this machine
are all that they share. *sent*: bytes that leave the publisher's host, over those of a version; *star*: every host
fetches from there.

| hosts | sent | star: sent | all have it, ms | star: all have it, ms |
|---|---|---|---|---|
{trees}

## While a generator serves

It runs passes of {least} through the same model, which do little but read the weights once: policies of this size have
no shorter passes of as many rows. A pass takes {pass_ms:.1f} ms, and {slowed:.2f} times as long while a version is
published beside it. Then serving stops for {pause_ms:.1f} ms, in which the version is applied: {ratios}.
"""


def write(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page into the folder; the path. found: the content of the JSON output."""
    serving = found["serving"]
    least, pass_ms = next(iter(serving["pass_ms"].items()))
    numbers = {key: found[key] for key in ("megabytes", "repeats", "torch", "threads", "cores", "others_cores")}
    text = _HEAD.format(
        date=datetime.now(UTC).date(),
        devices=", ".join(found["devices"]) or "no CUDA device",
        clock="" if found["devices"] else _CPU_CLOCK,
        limit_ratio=found["limit_ratio"],
        rows="\n".join(_row(name, mode) for name, mode in found["modes"].items()),
        trees="\n".join(_TREE.format(**tree) for tree in found["trees"]),
        tree_megabytes=found["tree_megabytes"],
        least=least,
        pass_ms=pass_ms,
        slowed=serving["slowed"],
        part_mb=PART_BYTES / 1e6,
        pause_ms=serving["pause_ms"],
        ratios=", ".join(f"{ratio:.2f} of a pass of {rows}" for rows, ratio in serving["pause_ratio"].items()),
        **numbers,
    )
    if found["left_out"]:
        text += "\n## Not run\n\n" + "\n".join(f"- {sentence}." for sentence in found["left_out"]) + "\n"
    path = folder / PAGE
    path.write_text(wrap_prose(text), encoding="utf-8")
    return [path]


_TREE = "| {hosts} | **{sent:.0f}** | {star_sent:.0f} | {ms:.0f} | {star_ms:.0f} |"
_CPU_CLOCK = (
    "Times are CPU times of the process, so waiting for a core or a lock does not count, but for what crosses between "
    "hosts."
)


def _row(name: str, mode: Mapping[str, Any]) -> str:
    cells = [name, *(f"{mode[key]:.0f}" for key in ("publish_ms", "apply_ms", "bare_ms"))]
    cells += [f"**{mode['ratio']:.2f}**", f"{mode['gb_per_s']:.1f}"]
    return f"| {' | '.join(cells)} |"
