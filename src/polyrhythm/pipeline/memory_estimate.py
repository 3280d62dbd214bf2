"""Estimates the memory of each station for weights and samples from declared forms, without building anything.

Not counted: activations, the environments of the simulators, and the Python interpreters.
"""

from __future__ import annotations

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.array_specs import arena_layout
from polyrhythm.pipeline.build import env_batch_infos, evaluator_name, generator_names
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.memory.weights import shared_nbytes
from polyrhythm.specs import EnvSpec, WeightsLayout

#: AdamW keeps two moments per trained number.
_MOMENTS = 2
#: How the purposes end whose memory is the host's, wherever the station is.
HOST = " (host)"


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
        "optimizer" + HOST * config.training.optimizer.offload: _MOMENTS * form.trainable_bytes,
    }
    return found
