"""Writes bench/results/adapters_applied.md: a generator that applies its adapters, and one that has merged them.

    python bench/scripts/adapters_applied.py [--device cuda] [--rank 32] [--out FILE]

One forward pass of a decoder over 32 tokens by rows, in bfloat16, and how far its outputs are from those of the
trainer, whose adapters are float32. Adapters have the size of early training: B is random at 1e-3.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.adapting import Adaptation, LoraSettings
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import Decoder, DecoderSize
from polyrhythm.policies.form import Role
from polyrhythm.policies.mlp import seeded

SIZE = DecoderSize(width=256, layers=3, mlp=1024, heads=4, kv_heads=1, head_dim=64, activation="gelu_tanh")
ROWS, TOKENS, REPEATS = (1, 8), 32, 7
PRECISION = Precision(torch.bfloat16)


def build(role: Role, rank: int, device: str) -> nn.Module:
    with seeded(0):
        network = Decoder(SIZE)
    adaptation = Adaptation("lora", {}, PRECISION, lora=LoraSettings(rank=rank, alpha=float(rank)))
    adaptation.prepare(network, role)
    adaptation.finish(network, role, 0)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape, generator=rng) * 1e-3)
    return network.to(device)


def run(network: nn.Module, rows: int, device: str) -> Tensor:
    x = torch.randn(rows, TOKENS, SIZE.width, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    places = torch.arange(TOKENS, device=device).expand(rows, -1)
    with torch.no_grad(), PRECISION.computing(device):
        found: Tensor = network(x, places, None)[0]
    return found.float()


def seconds(pass_: Callable[[], Tensor]) -> float:
    """Median of the passes, copying the answer to the host."""
    taken = []
    for _ in range(REPEATS + 2):
        begin = time.perf_counter()
        pass_().cpu()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def merge(network: nn.Module) -> None:
    """Add every adapter to its matrix."""
    for module in network.modules():
        if hasattr(module, "lora_A") and hasattr(module, "merge"):
            module.merge()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "adapters_applied.md")
    given = parser.parse_args()
    device = given.device
    training, applied, merged = (build(role, given.rank, device) for role in ("train", "act", "act"))
    begin = time.perf_counter()
    merge(merged)
    merging = time.perf_counter() - begin
    lines = []
    for rows in ROWS:
        fast, slow = (seconds(lambda n=n, rows=rows: run(n, rows, device)) for n in (merged, applied))  # type: ignore[misc]
        lines.append(f"| {rows} | {slow * 1e3:.1f} | {fast * 1e3:.1f} | {slow / fast:.2f} |")
    expected = run(training, 8, device)
    gaps = [float((run(n, 8, device) - expected).abs().max()) for n in (applied, merged)]
    effect = float((run(build_base(training), 8, device) - expected).abs().max())
    given.out.write_text(
        f"""# Adapters in a generator: applied or merged

`python bench/scripts/adapters_applied.py --device {device} --rank {given.rank}`,
{dt.datetime.now().astimezone().date()}; torch {torch.__version__}, {torch.get_num_threads()} thread(s) on the CPU.

A decoder of {SIZE.layers} layers, width {SIZE.width}, bfloat16, {TOKENS} tokens per row, adapters of rank {given.rank}
in all linear layers; medians of {REPEATS} passes. Merging took {merging * 1e3:.0f} ms, once per version.

| rows | applied [ms] | merged [ms] | applied/merged |
|---|---|---|---|
{chr(10).join(lines)}

Largest difference of an output from the trainer's: applied {gaps[0]:.2g}, merged {gaps[1]:.2g}; without adapters
{effect:.2g}. Merged matrices are rounded to bfloat16, which loses changes that are small beside the weight.
""",
        encoding="utf-8",
    )


def build_base(network: nn.Module) -> nn.Module:
    """The network with its adapters off, for good."""
    for module in network.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(False)
    return network


if __name__ == "__main__":
    main()
