"""Writes bench/results/frozen_prefix.md: π0's updates with 1, 2 and 4 epochs by the three ways of
`polyrhythm_bench.cases.prefixes`.

    python bench/scripts/frozen_prefix.py [--device cuda] [--size released] [--repeats 5] [--out FILE]

The policy is π0 as `bench policies` has it (tiny: a million parameters), with `train: expert`; 2 epochs are those of
`metaworld_pi0`.
"""

from __future__ import annotations

import argparse
import datetime as dt
from pathlib import Path

import torch

from polyrhythm.imports import keep_freed_memory
from polyrhythm.policies.base import as_module
from polyrhythm_bench.cases import prefixes
from polyrhythm_bench.cases.policies import build, spec_of
from polyrhythm_bench.harness.markdown import wrap_prose

EPOCHS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "frozen_prefix.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run's processes do
    device, spec = torch.device(given.device), spec_of("pi0", given.size)
    policy = build("pi0", given.size, device, "expert")
    found = []
    for epochs in EPOCHS:
        found.append(prefixes.measure(policy, spec, device, given.repeats, epochs))
        print(found[-1], flush=True)
    flags = f"--device {given.device} --size {given.size} --repeats {given.repeats}"
    parameters = list(as_module(policy).parameters())
    millions = sum(p.numel() for p in parameters) / 1e6
    trained = sum(p.numel() for p in parameters if p.requires_grad) / 1e6
    clock = "seconds of CPU, one thread" if given.device == "cpu" else torch.cuda.get_device_name()
    gap, last = max(x["largest_difference"] for x in found), found[-1]
    given.out.write_text(
        wrap_prose(f"""# A frozen prefix, computed once

`python bench/scripts/frozen_prefix.py {flags}`, {dt.datetime.now().astimezone().date()}; torch {torch.__version__}.
Times: {clock}.

π0, {millions:.1f}M parameters, of which {trained:.1f}M are trained. An update: {prefixes.SAMPLES * prefixes.STEPS}
chunk steps, {prefixes.MINI} per optimizer step, {prefixes.MICRO} per pass; medians of {given.repeats} updates of each
way, in turns, each from the same weights. Kept per chunk step: {last["kept_kib"]:.0f} KiB. *gain*: lending beside the
trainer's own prefixes, computed once. *passes alone*: the forward and backward passes over prefixes that lie ready,
which every way makes.

{prefixes.table(found)}

Largest difference of a weight between the last two ways: {gap:.1g}.
A generator's pass of {prefixes.STEPS} rows takes {last["lending_ms"]:.1f} ms with lending, {last["plain_ms"]:.1f} ms
without.
"""),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
