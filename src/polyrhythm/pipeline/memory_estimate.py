"""Estimates the memory of each station for weights and samples from declared forms, without building anything.

Not counted: activations, the environments of the simulators, and the Python interpreters.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import StartError
from polyrhythm.pipeline.array_specs import arena_layout
from polyrhythm.pipeline.build import env_batch_infos, evaluator_name, generator_names
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.tensors import free_bytes
from polyrhythm.runtime.memory.weights import shared_nbytes
from polyrhythm.specs import EnvSpec, WeightsLayout

#: AdamW keeps two moments per trained number.
_MOMENTS = 2
#: Ending of parts that are in host memory wherever the station computes.
_HOST = " (host)"


def memory_by_station(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> dict[str, dict[str, int]]:
    """Bytes by station and purpose; `shared` is the host's shared memory.

    shared: the arena's blocks and two versions of the published weights. simulators: the arena blocks that their rows
    write at a time. generators: their modules and, unless on the CPU, the staging buffer. trainer: weights, gradients,
    optimizer.
    """
    infos = env_batch_infos(config, spec)
    arena = arena_layout(config, spec, infos, form)
    layout = WeightsLayout.of(form.published)
    block = arena.nbytes // arena.blocks
    found = {"shared": {"arena": arena.nbytes, "published weights": shared_nbytes(layout)}}
    for batches in infos:
        rows = sum(slot.rows for info in batches for slot in info.slots)
        found[batches[0].name.rpartition(".")[0]] = {"arena blocks": rows * block}
    seats = config.placement
    on_cpu = seats.generators.devices == "cpu" or (seats.generators.devices is None and seats.preset is None)
    staging = {} if on_cpu else {"staging": layout.nbytes}
    evaluator = evaluator_name(config)
    for name in dict.fromkeys([*generator_names(config), *[evaluator] * bool(evaluator)]):
        pinned = {"weights of the evaluation": form.act_bytes}
        both = name == evaluator and name in generator_names(config)
        stages = staging if name in generator_names(config) else {}
        found[name] = {"weights": form.act_bytes, **(pinned if both else {}), **stages}
    found["trainer"] = {
        "weights": form.train_bytes,
        "gradients": form.trainable_bytes,
        "optimizer" + _HOST * config.training.optimizer.offload: _MOMENTS * form.trainable_bytes,
    }
    return found


def refuse_memory_shortage(
    memory: Mapping[str, Mapping[str, int]],
    seats: Mapping[str, Resources],
    free: Mapping[str, int] | None = None,
) -> None:
    """Raise StartError if a device, or the host, has less free memory than its stations take in any case.

    memory: of `memory_by_station`; shared memory is checked elsewhere. seats: of these stations; free: bytes by
    device (others are not checked), by default of all devices, which takes some memory on each.
    """
    wanted: dict[str, dict[str, int]] = {}
    for name, parts in memory.items():
        if name not in seats:
            continue
        for part, size in parts.items():
            if part == "arena blocks":  # in shared memory
                continue
            device = "cpu" if part.endswith(_HOST) else seats[name].device
            wanted.setdefault(device, {}).setdefault(name, 0)
            wanted[device][name] += size
    for device, stations in wanted.items():
        if free is not None and device not in free:
            continue
        total, there = sum(stations.values()), free_bytes(device) if free is None else free[device]
        if total > there:
            parts_told = ", ".join(f"{name} {_gigabytes(size)}" for name, size in stations.items())
            raise StartError(
                f"memory of {'this machine' if device == 'cpu' else device}: its stations need {_gigabytes(total)} "
                f"without activations ({parts_told}) and {_gigabytes(there)} are free; train less of the policy "
                "(policy.train), set training.optimizer.offload, use fewer rollout.generators, or other devices in "
                "placement"
            )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
