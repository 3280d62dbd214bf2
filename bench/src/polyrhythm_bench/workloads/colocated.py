"""π0 with random weights on Meta-World, simulators on the cores and generator and trainer on one device: the scene of
`bench gpu-colocated`, full size or small, and the settings of its modes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.mujoco import is_loadable
from polyrhythm.plugins.pretrained.building import save_new
from polyrhythm.plugins.sharing.mps import PROGRAM
from polyrhythm.plugins.vla.pi0.network import PI0, Pi0Network, Pi0Size
from polyrhythm.plugins.vla.pi0.settings import PROMPT_LENGTH, Pi0SizeSettings
from polyrhythm.plugins.vla.prompts import WORDS
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.policies.form import PolicyForm

#: Cameras that show the one image that the environment draws, executed actions, denoise steps, passes over an update.
CAMERAS, CHUNK, STEPS, EPOCHS = 2, 5, 4, 2
#: Words are hashed, and actions lie between the environment's bounds.
_CHOICES = {"tokenizer": WORDS, "robot": BOUNDS}
_ON_POLICY = {"max_lag": 0, "on_update": "drain"}
_LAGGING = {"max_lag": 1, "on_update": "continue"}


class Mode(NamedTuple):
    """asynchronous: env batches do not wait for each other. sharing: of the device, see `placement.sharing`. lends: the
    generator lends prefixes; else the trainer computes them once and keeps them in host memory."""

    asynchronous: bool
    freshness: Mapping[str, Any]
    sharing: str = "share"
    lends: bool = True


MODES: Mapping[str, Mode] = {
    "lockstep": Mode(False, _ON_POLICY),
    "rollout_async": Mode(True, _ON_POLICY),
    "train_async": Mode(False, _LAGGING),
    "full_async": Mode(True, _LAGGING),
    "lockstep_leased": Mode(False, _ON_POLICY, "lease"),
    "full_async_process": Mode(True, _LAGGING, "process"),
    "full_async_mps": Mode(True, _LAGGING, "mps"),
    "full_async_unlent": Mode(True, _LAGGING, lends=False),
}
#: Modes that differ in nothing but the device's sharing.
SHARINGS = ("full_async", "full_async_process", "full_async_mps")
#: Modes with drawings that say most, first.
FIRST = (
    "full_async-osmesa", "lockstep-egl", "full_async_mps-osmesa", "full_async_process-osmesa", "lockstep-osmesa",
    "full_async-egl", "lockstep_leased-egl", "full_async_unlent-osmesa",
)  # fmt: skip
_MIB, _GIB = 2**20, 2**30


class Scene(NamedTuple):
    """rows: environments of all simulators, and episodes of an update; image: side of the drawn image; render: quality;
    max_steps: of an episode; precomputed_mib: see `training.precomputed_mib`; device: cuda or cpu."""

    size: str
    device: str
    rows: int
    simulators: int
    image: int
    render: str
    max_steps: int
    precomputed_mib: int

    def network(self) -> Pi0Size:
        """The network's size."""
        if self.size == "tiny":
            return Pi0SizeSettings().network(horizon=CHUNK, action_dim=4, state_dim=4)
        return replace(Pi0Size(), horizon=CHUNK)

    @property
    def minimum_s(self) -> float:
        """Seconds that a mode needs at least, its start and end included."""
        return 10.0 if self.size == "tiny" else 60.0

    @property
    def ending_s(self) -> float:
        """Seconds that the end of a mode takes, about."""
        return 2.0 if self.size == "tiny" else 8.0


def rows_of(scene: Scene) -> dict[str, tuple[str, str]]:
    """The rows of the benchmark in order of value: MODE-BACKEND → mode and value of MUJOCO_GL. On a CPU, where nothing
    but the cores can draw, MODE → mode and ""."""
    if scene.device == "cpu":
        return {mode: (mode, "") for mode in MODES}
    every = {f"{mode}-{gl}": (mode, gl) for mode in MODES for gl in ("osmesa", "egl")}
    return {name: every[name] for name in dict.fromkeys((*FIRST, *every))}


def why_not(mode: str, gl: str) -> str:
    """What this machine lacks for a row, in words; "" if nothing."""
    if gl and not is_loadable(gl):
        return f"no library of {gl}"
    if MODES[mode].sharing == "mps" and shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not on the PATH"
    return ""


def scene_of(*, tiny: bool) -> Scene:
    """The scene for this machine. Environments are dealt to as many simulators as there are cores, or to half of
    them, and so on, until they divide evenly."""
    rows = 8 if tiny else 64
    cores = psutil.cpu_count() or 1
    simulators = 1
    while 2 * simulators <= min(cores, rows):
        simulators *= 2
    if tiny:
        return Scene("tiny", "cpu", rows, simulators, 56, "cheap", 20, 1024)
    return Scene("released", "cuda", rows, simulators, 224, "full", 50, 20480)


def make_checkpoint(scene: Scene, folder: Path) -> None:
    """A released folder with random weights in bfloat16 (float32 if tiny), drawn on the device. A run without a
    checkpoint draws 3.5 billion numbers on the CPU in each of its processes, which takes longer than is measured."""
    dtype = torch.float32 if scene.size == "tiny" else torch.bfloat16
    with torch.device(scene.device):
        network = Pi0Network(scene.network())
        network.initialise()
    state = {f"network.{name}": tensor.to("cpu", dtype) for name, tensor in network.state_dict().items()}
    save_new(PI0, network.size, state, folder, _CHOICES)
    del network
    if scene.device == "cuda":
        torch.cuda.empty_cache()


def config_of(scene: Scene, mode: str, checkpoint: Path | None) -> RunConfig:
    """The run of a mode. checkpoint: None for a policy of the same form from the seed."""
    asynchronous, freshness, sharing, lends = MODES[mode]
    batching: dict[str, Any] = {"type": "lockstep"}
    if asynchronous:
        batching = {"type": "dynamic", "max_rows": max(scene.rows // 2, scene.rows // scene.simulators)}
        batching["max_wait_ms"] = 20.0
    tree: dict[str, Any] = {
        "name": "gpu-colocated",
        "env": {
            "type": "metaworld",
            "tasks": ["button-press-v3", "door-close-v3"],
            "image_size": scene.image,
            "render": scene.render,
            "max_steps": scene.max_steps,
            "end_on_success": False,
            "reward": "dense",
        },
        "policy": {
            "type": "pi0",
            "checkpoint": str(checkpoint or ""),
            **({} if scene.size == "tiny" else {"size": scene.size}),
            "cameras": {"base_0_rgb": "image", "left_wrist_0_rgb": "image"},
            "chunk": CHUNK,
            "steps": STEPS,
            "train": "expert",
            "dtype": "float32" if scene.size == "tiny" else "bfloat16",
        },
        "rollout": {
            "simulators": scene.simulators,
            "rows": scene.rows // scene.simulators,
            "buckets": "powers",  # so that the passes are captured on a GPU
        },
        "batching": batching,
        "freshness": dict(freshness),
        "training": {
            "versions": 100_000,  # it is stopped by the clock
            "mini_batch_samples": scene.rows,
            "epochs": EPOCHS,
            "minibatch_steps": 0,
            "micro_batch_steps": 64,
            "precomputed_mib": scene.precomputed_mib if lends else 0,
            "optimizer": {"lr": 5e-6},
        },
        "checkpoint": {"every_versions": 100_000, "run_every_s": 1e6},
    }
    if scene.device == "cpu" and sharing == "process":
        tree["placement"] = {"sharing": sharing}
    if scene.device == "cuda":
        tree["placement"] = {"generators": {"devices": 0}, "trainer": {"devices": 0}, "sharing": sharing}
    return validate(tree)


def memory_plan(scene: Scene, form: PolicyForm) -> dict[str, float]:
    """GiB on the device by purpose, without the activations of passes and the pools of their graphs."""
    size = scene.network()
    tokens = CAMERAS * size.vision.tokens + PROMPT_LENGTH["pi0"]
    width = 4 if scene.size == "tiny" else 2
    per_step = 2 * size.vlm.layers * size.vlm.kv_heads * size.vlm.head_dim * tokens * width
    kept = scene.rows * -(-scene.max_steps // CHUNK) * per_step
    plan = {
        "generator: weights": form.act_bytes,
        "trainer: weights": form.train_bytes,
        "trainer: gradients": form.trainable_bytes,
        "trainer: moments": 2 * form.trainable_bytes,
        # What generators lend; with a lease the trainer computes those of an update.
        "trainer: prefixes, at most": min(4 * kept, scene.precomputed_mib * _MIB),
        "trainer: newest version for the generator": sum(spec.nbytes for spec in form.published.values()),
    }
    return {name: nbytes / _GIB for name, nbytes in plan.items()}
