"""The released architectures by policy type, and their folders (`policies.base.FolderFormat`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.cli.policies import memory_lines
from polyrhythm.cli.show import aligned, size_text
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.adapters import Adapters, is_adapter, merge, refuse_adapters, save_adapters
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import check_fit, released_size
from polyrhythm.plugins.pretrained.saving import save_folder, save_new
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.inspection import Inspection, architecture, inspect
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.plugins.vla.tokenizers import WORDS
from polyrhythm.policies.base import FolderReport, as_module
from polyrhythm.policies.form import load_published, weights_on_meta

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.plugins.vla.settings import VlaSettings


class VlaFolders:
    """Folders of all architectures here."""

    def export(
        self, settings: VlaSettings, weights: Mapping[str, Tensor], out: Path, *, base: str, source: Path, env: Any
    ) -> str:
        """Export in the layout of `base`, or as its adapters; without a base as a new folder."""
        kind = settings.type  # type: ignore[attr-defined]
        if not base:
            self._export_new(settings, weights, out, source, *env)
            return "network"
        opened = Checkpoint.open(base)
        opened.require(kind)
        if any(is_adapter(name) for name in weights):
            lora = settings.lora
            save_adapters(weights, out, alpha=lora.alpha, base=opened, also=lora.also, prefix=opened.prefix)
            return "adapters"
        save_folder(opened, architecture(kind), weights, out)
        return "network"

    def _export_new(
        self, settings: VlaSettings, weights: Mapping[str, Tensor], out: Path, source: Path, spec: Any, seed: int
    ) -> None:
        """Export a policy that was drawn from a seed; tensors that its file lacks are drawn again."""
        refuse_adapters(source, weights)
        if spec is None:
            raise ConfigError(f"{source}: the file lacks the environment's form; resume the run once, which adds it")
        policy = as_module(settings.build(spec, seed=seed, device="cpu", role="train"))
        load_published(policy, weights)
        inputs, network = policy.get_submodule("inputs"), policy.get_submodule("network")
        assert isinstance(inputs, VlaInputs)
        choices = {"tokenizer": WORDS, "robot": BOUNDS, "cameras": [slot for slot, _ in inputs.plan.cameras]}
        save_new(architecture(settings.type), network.size, policy.state_dict(), out, choices)  # type: ignore[attr-defined]

    def recognises(self, folder: Path) -> bool:
        return bool(Checkpoint.open(folder).architecture)

    def inspect(self, folder: Path) -> FolderReport:
        found = inspect(folder)
        return FolderReport(found.plain(), "\n".join(inspection_lines(found)), found.fits)

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        opened = Checkpoint.open(base)
        check_whole(opened)
        merge(Adapters.open(adapters), opened, architecture(opened.architecture), out)


def check_whole(checkpoint: Checkpoint) -> None:
    """ConfigError: the folder does not have exactly the tensors of its architecture in their shapes. Reads no
    tensor."""
    kind = checkpoint.architecture
    checkpoint.require(kind)
    of = architecture(kind)
    with weights_on_meta():
        network = of.network(released_size(of, checkpoint))
    check_fit(of, checkpoint, network)


def inspection_lines(found: Inspection) -> list[str]:
    dtypes = ", ".join(f"{count / found.parameters:.0%} {dtype}" for dtype, count in found.dtypes.items())
    assumed = " (assumed: no config.json)" * found.horizon_assumed
    no_robots = "none: no normalisation statistics were found"
    if found.statistics:
        no_robots = "one without a key: leave policy.robot out"
    files = f"{found.files} file{'s' * (found.files != 1)}"
    rows = {
        "architecture": found.architecture,
        "tensors": f"{found.parameters:,} numbers ({dtypes}), {size_text(found.file_bytes)} in {files}",
        "actions": f"{found.horizon}{assumed} predicted, of {found.action_dim} entries",
        "robots": ", ".join(found.robots) or no_robots,
        "cameras": ", ".join(found.cameras) or "not told by the folder",
        "statistics": ", ".join(found.statistics) or "none",
        "tokenizer": found.tokenizer or "none: name one as policy.tokenizer",
        **({"side files": ", ".join(found.side)} if found.side else {}),
        **({"ours": f"{len(found.ours)} tensors of critic and heads in polyrhythm.safetensors"} if found.ours else {}),
        "fit": found.misfit or f"whole: every tensor of {found.architecture} is there, and no other",
        "trainable": ", ".join(f"{train} {count:,}" for train, count in found.trainable.items()),
    }
    told = [aligned(rows.items()), "", *memory_lines(found.memory), ""]
    return [*told, found.recipe or "no lines for a recipe: training refuses a folder that does not fit"]
