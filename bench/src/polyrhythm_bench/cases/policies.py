"""The published policies beside plain forward passes written with transformers' modules: acting, training, weights.

Ours and the reference (`polyrhythm_bench.references`) have the same sizes, images, tokens and steps, random weights,
and take turns; every ratio is ours over the reference within one run. What ours does beyond the reference: the draws
from noise keys, log-probs, and un-normalised actions; a training pass also gives entropies.

    act      `policy.act` of so many rows; the reference makes actions and a value
    train    one micro-batch, forward and backward, of `evaluate`: the loss is the sum of log-probs, values and
             entropies (the learner's loss adds elementwise arithmetic only); the reference sums velocities (or
             log-probs) and values
    weights  a version of all weights through the weights channel, beside `copy_` tensor by tensor from the host
    updates  with a frozen prefix: computed in every epoch, once by the trainer, or lent (`cases.prefixes`)

The policy is built as in the trainer with `train: all`, for `updates` with what leaves the prefix frozen. At full size
(`released`) trained weights are bfloat16 too, so the module has the dtypes of one for acting. Weights are drawn on the
device: from the seed, on one core of the CPU, they would take half a minute for each billion.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyrhythm.errors import ConfigError
from polyrhythm.policies.base import Observations, Policy, as_module
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm_bench.cases import prefixes
from polyrhythm_bench.cases.policy_weights import measure_weights
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.harness.roofline import PassCount, Peaks, count, measure_peaks, seconds
from polyrhythm_bench.references import reference_of
from polyrhythm_bench.references.base import Inputs, Reference

log = logging.getLogger(__name__)

TYPES = ("pi0", "pi05", "openvla_oft", "groot_n1d5")
SIZES = ("tiny", "released")
ROWS = (1, 8, 32, 64)
#: Rows of the training micro-batch, cameras, executed actions, denoise steps.
TRAIN_ROWS, CAMERAS, CHUNK, STEPS = 8, 2, 5, 4
_STATE, _ACTIONS = 8, 7
#: What is trained so that the prefix is frozen.
FROZEN = {"pi0": "expert", "pi05": "expert", "openvla_oft": "head", "groot_n1d5": "expert"}
_GIB = 2**30
NOT_KEPT = KeptResults(None, {})


class _Pair(NamedTuple):
    """Our policy and the reference on a device, and the environment's spec."""

    policy: Policy
    reference: Reference
    spec: EnvSpec
    device: torch.device


def run(
    types: Sequence[str] = TYPES,
    sizes: Sequence[str] = ("tiny",),
    rows: Sequence[int] = ROWS,
    repeats: int = 7,
    device: str = "",
    out: Path | None = None,
) -> dict[str, Any]:
    """Every type in every size. device: cpu or cuda; empty: cuda where there is one. out: folder in which each pass is
    kept when it is measured, and not measured again.

    Returns the device, how it was measured, `left_out` with a sentence for each size that cannot be run here, and
    `parts`: for each type and size what `measure` returns. ConfigError: no such device.
    """
    where = choose_device(device)
    found: dict[str, Any] = {}
    left_out: list[str] = []
    began = resources.read_cpu()
    for size in sizes:
        refusals = {kind: refusal(kind, size, where) for kind in types}
        left_out += [why for why in refusals.values() if why]
        for kind in (kind for kind, why in refusals.items() if not why):
            log.info("%s, %s", kind, size)
            kept = KeptResults(out, {**identity(where), "repeats": repeats})
            found[f"{kind}, {size}"] = measure(kind, size, where, rows, repeats, kept)
            if where.type == "cuda":
                torch.cuda.empty_cache()
    return {
        **identity(where),
        "others_cores": resources.others_cores(began, resources.read_cpu()),
        "repeats": repeats,
        "cameras": CAMERAS,
        "chunk": CHUNK,
        "steps": STEPS,
        "left_out": left_out,
        "parts": found,
    }


def identity(device: torch.device) -> dict[str, Any]:
    """What measured."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def choose_device(name: str) -> torch.device:
    """The device. ConfigError: cuda is asked for and not there."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here; leave it out, or use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def refusal(kind: str, size: str, device: torch.device) -> str:
    """Why this size cannot be measured on this device, in one sentence; "" if it can."""
    if size == "tiny":
        return ""
    said = f"{kind}, {size}: left out, "
    if device.type != "cuda":
        return f"{said}because the full size takes minutes a pass on a CPU; run it where there is a GPU"
    form = settings_of(kind, size).form(spec_of(kind, size))
    needed, there = 4 * form.act_bytes + 16 * _GIB, torch.cuda.mem_get_info(device)[1]
    if needed > there:
        return (
            f"{said}because ours and the reference with gradients take {needed / _GIB:.0f} GiB and the device has "
            f"{there / _GIB:.0f}; run it on a larger one"
        )
    return ""


def settings_of(kind: str, size: str, train: str = "all") -> Any:
    """The policy's settings: default size in float32, or full size in bfloat16."""
    from polyrhythm.config.registry import resolve

    given: dict[str, Any] = {"type": kind, "chunk": CHUNK, "dtype": "float32", "train": train}
    if size == "released":
        given |= {"size": "released", "dtype": "bfloat16", "master": "bfloat16"}
    if kind != "openvla_oft":
        given["steps"] = STEPS
    return resolve("policy", given)


def spec_of(kind: str, size: str) -> EnvSpec:
    """An environment with images of the network's size, so that nothing is resized."""
    side = 224 if size == "released" else settings_of(kind, size).size.image
    images = {f"camera_{n}": ArraySpec((side, side, 3), "uint8") for n in range(CAMERAS)}
    bounds = ((-1.0,) * _ACTIONS, (1.0,) * _ACTIONS)
    action = ActionSpec("continuous", _ACTIONS, low=bounds[0], high=bounds[1])
    tasks = (Task("cup", "put the cup on the table"), Task("door", "open the door of the cabinet"))
    return EnvSpec({**images, "proprio": ArraySpec((_STATE,), "float32")}, action, tasks, 100)


def measure(
    kind: str,
    size: str,
    device: torch.device,
    rows: Sequence[int] = ROWS,
    repeats: int = 7,
    kept: KeptResults = NOT_KEPT,
) -> dict[str, Any]:
    """One type in one size: parameters in millions, the measured peaks, what the reference replaces, `weights`, in
    `modes` the passes (`_compare`), and `updates` (`prefixes.measure`)."""
    pair = cache(lambda: build_pair(kind, size, device))
    peaks = cache(lambda: measure_peaks(device, _dtype(size)))
    # Weights first: a version is applied as it is, and no gradient is there yet.
    about = kept.get(f"{kind}-{size}", lambda: _about(pair(), peaks(), size, repeats))
    modes = {
        f"act {n}": kept.get(f"{kind}-{size}-act-{n}", partial(lambda n: acting(pair(), n, peaks(), repeats), n))
        for n in rows
    }
    train = kept.get(f"{kind}-{size}-train-{TRAIN_ROWS}", lambda: training(pair(), peaks(), repeats))
    pair.cache_clear()  # room for the policy below
    updates = kept.get(f"{kind}-{size}-updates", lambda: _updates(kind, size, device, repeats))
    return {**about, "modes": {**modes, f"train {TRAIN_ROWS}": train}, "updates": updates}


def _updates(kind: str, size: str, device: torch.device, repeats: int) -> dict[str, Any]:
    return prefixes.measure(build(kind, size, device, FROZEN[kind]), spec_of(kind, size), device, repeats)


def build(kind: str, size: str, device: torch.device, train: str) -> Any:
    """The policy as in the trainer."""
    with _ZeroDraws():
        policy = settings_of(kind, size, train).build(spec_of(kind, size), seed=0, device=str(device), role="train")
    _draw(as_module(policy))
    return policy


def build_pair(kind: str, size: str, device: torch.device) -> _Pair:
    spec, policy = spec_of(kind, size), build(kind, size, device, "all")
    with torch.device(device):
        reference = reference_of(kind, policy.network.size, STEPS)
    reference = reference.to(device=device, dtype=_dtype(size)).eval()
    as_module(policy).eval()
    return _Pair(policy, reference, spec, device)


def _about(pair: _Pair, peaks: Peaks, size: str, repeats: int) -> dict[str, Any]:
    modules = as_module(pair.policy), pair.reference
    counts = [sum(p.numel() for p in module.parameters()) / 1e6 for module in modules]
    weights = measure_weights(modules[0], repeats)
    return {
        "parameters_m": counts[0],
        "reference_parameters_m": counts[1],
        "dtype": str(_dtype(size)).removeprefix("torch."),
        "peak_tflops": peaks.flops_per_s / 1e12,
        "peak_gb_per_s": peaks.bytes_per_s / 1e9,
        "nearest": pair.reference.nearest,
        **{f"weights_{name}": value for name, value in weights.items()},
    }


class _ZeroDraws(TorchFunctionMode):
    """Within it parameters that modules would draw are zero."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _draw(module: torch.nn.Module) -> None:
    """Draw matrices where they are, as wide as in the published initialisations."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)


def acting(pair: _Pair, rows: int, peaks: Peaks, repeats: int) -> dict[str, Any]:
    """`act` beside the reference. On a CUDA device also `captured_ms`: the pass as a CUDA graph, as a generator with
    `rollout.buckets` runs it."""
    obs = observations(pair, rows)
    greedy, keys = torch.zeros(rows, dtype=torch.bool), torch.arange(rows, dtype=torch.int64)
    greedy, keys = greedy.to(pair.device), keys.to(pair.device)
    inputs = reference_inputs(pair, obs)
    outputs = 2 * 4 * rows * CHUNK * _ACTIONS  # actions and log-probs

    @torch.inference_mode()
    def ours() -> None:
        pair.policy.act(obs, greedy, keys)

    found = _compare(pair, ours, lambda: pair.reference.act(inputs), peaks, repeats, io=_nbytes(obs) + outputs)
    found = {"rows": rows, "actions_per_s": 1e3 * rows * CHUNK / found["ms"], **found}
    if pair.device.type == "cuda":
        found["captured_ms"] = _captured_ms(ours, pair.device, repeats)
    return found


def training(pair: _Pair, peaks: Peaks, repeats: int) -> dict[str, Any]:
    """A micro-batch, forward and backward. Bytes: weights and gradients once each."""
    obs = observations(pair, TRAIN_ROWS)
    keys = torch.arange(TRAIN_ROWS, dtype=torch.int64, device=pair.device)
    act = pair.policy.act(obs, torch.zeros_like(keys, dtype=torch.bool), keys)
    kept = {name: x.clone() for name, x in act.forward_inputs.items()}
    inputs, modules = reference_inputs(pair, obs), (as_module(pair.policy), pair.reference)

    def ours() -> None:
        found = pair.policy.evaluate(obs, kept)
        (found.logprob.sum() + found.value.sum() + found.entropy.sum()).backward()
        modules[0].zero_grad(set_to_none=True)

    def theirs() -> None:
        pair.reference.loss(inputs).backward()
        modules[1].zero_grad(set_to_none=True)

    gradients = sum(p.nbytes for p in modules[0].parameters() if p.requires_grad)
    found = _compare(pair, ours, theirs, peaks, repeats, io=_nbytes(obs) + gradients)
    return {"rows": TRAIN_ROWS, "actions_per_s": 1e3 * TRAIN_ROWS * CHUNK / found["ms"], **found}


def _compare(
    pair: _Pair, ours: Callable[[], object], theirs: Callable[[], object], peaks: Peaks, repeats: int, *, io: int
) -> dict[str, Any]:
    """ms and reference_ms (medians), ratio (median of the turns), gflop, weights_mb, peak_mb of both, and of_roofline:
    the least time that the device allows over the time. io: bytes in and out beside the weights."""
    counts = [_counted(module, run) for module, run in ((pair.policy, ours), (pair.reference, theirs))]
    turns: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        first, second = (ours, theirs) if turn % 2 else (theirs, ours)
        pairs = seconds(first, pair.device), seconds(second, pair.device)
        turns.append(pairs if turn % 2 else pairs[::-1])
    own, other = (statistics.median(part) for part in zip(*turns[1:], strict=True))
    times = {"": (own, counts[0]), "reference_": (other, counts[1])}
    found: dict[str, Any] = {"ratio": statistics.median(a / b for a, b in turns[1:])}
    for prefix, (time_s, counted) in times.items():
        found[f"{prefix}ms"] = 1e3 * time_s
        found[f"{prefix}of_roofline"] = peaks.least_s(counted.flops, counted.weight_bytes + io) / time_s
        found[f"{prefix}gflop"] = counted.flops / 1e9
        found[f"{prefix}weights_mb"] = counted.weight_bytes / 1e6
        found[f"{prefix}peak_mb"] = counted.peak_bytes / 1e6
    return found


def _counted(module: Any, run: Callable[[], object]) -> PassCount:
    run()  # once before, so that constants which are kept are not counted
    return count(run, module.parameters())


def observations(pair: _Pair, rows: int) -> dict[str, Tensor]:
    """Random rows of the environment on the device."""
    rng = torch.Generator().manual_seed(rows)
    obs: dict[str, Tensor] = {}
    for name, array in pair.spec.observation.items():
        shape = (rows, *array.shape)
        uint8 = array.dtype == "uint8"
        obs[name] = (
            torch.randint(0, 256, shape, generator=rng).to(torch.uint8) if uint8 else torch.rand(shape, generator=rng)
        )
    obs |= {INSTRUCTION: torch.arange(rows) % len(pair.spec.tasks), PROGRESS: torch.zeros(rows)}
    return {name: x.to(pair.device) for name, x in obs.items()}


def reference_inputs(pair: _Pair, obs: Observations) -> Inputs:
    """The same images, and the prompt's tokens and state as our policy makes them."""
    given: Mapping[str, Tensor] = pair.policy.inputs(obs)  # type: ignore[attr-defined]
    tokens = "tokens" if "tokens" in given else "input_ids"
    present = "token_present" if "token_present" in given else "attention_mask"
    cameras = torch.stack([obs[f"camera_{n}"] for n in range(CAMERAS)], dim=1)
    return Inputs(cameras, given[tokens], given[present].bool(), given["state"])


def _captured_ms(run: Callable[[], None], device: torch.device, repeats: int) -> float | None:
    from polyrhythm.stations.passes import GraphCapture

    try:
        replay = GraphCapture(device)(run)
    except RuntimeError as error:
        log.warning("the pass cannot be captured as a CUDA graph: %s", error)
        return None
    replay()
    return 1e3 * statistics.median(seconds(replay, device) for _ in range(repeats))


def _dtype(size: str) -> torch.dtype:
    return torch.bfloat16 if size == "released" else torch.float32


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())
