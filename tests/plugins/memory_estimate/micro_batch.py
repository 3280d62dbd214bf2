"""Runs a micro-batch of each policy in a process of its own and prints by how many bytes the process grew at most.

    python -m tests.plugins.memory_estimate.micro_batch ROWS POLICY [ROWS POLICY ...]

A line for each. The processes are forks of one that has imported everything and run nothing. A thread of one core, and
freed memory goes back to the system, so that what is held is what the process has.
"""

from __future__ import annotations

import json
import re
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.config.load import load_config
from polyrhythm.pipeline.array_specs import shown
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.policies.base import Policy, as_module, extended
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits
from polyrhythm.specs import ArraySpec, EnvSpec


def parts(policy: str) -> tuple[Any, EnvSpec, PolicyForm]:
    """Settings of the policy in a quickstart's environment, that environment's spec, and the policy's form."""
    recipe = "quickstart_lm" if "causal_lm" in policy else "quickstart"
    config = load_config(recipe, [f"policy={policy}"])
    spec, settings = env_settings(config).spec(), policy_settings(config)
    return settings, spec, settings.form(spec)


def zeros(arrays: dict[str, ArraySpec], rows: int) -> dict[str, Tensor]:
    return {name: torch.zeros((rows, *x.shape), dtype=getattr(torch, x.dtype)) for name, x in arrays.items()}


def run_once(policy: Policy, spec: EnvSpec, form: PolicyForm, rows: int) -> int:
    """A forward and backward pass. Returns the bytes of the tensors that it saved for the backward pass, each memory
    once, without parameters and inputs."""
    module = as_module(policy)
    obs, answers = zeros(dict(shown(spec)), rows), zeros(dict(form.answers), rows)
    given = [*module.parameters(), *module.buffers(), *obs.values(), *answers.values()]
    known = {x.untyped_storage().data_ptr() for x in given}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        longest = policy_traits(policy).counts_tokens
        found = (extended(policy).evaluate_longest if longest else policy.evaluate)(obs, answers)
    (found.logprob.sum() + found.value.sum() + found.entropy.sum()).backward()  # type: ignore[no-untyped-call]
    module.zero_grad()
    return sum(saved.values())


def resident(line: str) -> int:
    """Bytes by /proc/self/status, `VmRSS` now or `VmHWM` at most."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return 1024 * int(found[1])


def measure(policy: str, rows: int) -> dict[str, int]:
    """held: growth of the process at most; saved: as from `run_once`; gradients: bytes of all gradients."""
    settings, spec, form = parts(policy)
    made = settings.build(spec, seed=0, device="cpu", role="train")
    as_module(made).eval()
    run_once(made, spec, form, 2)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = resident("VmRSS")
    saved = run_once(made, spec, form, rows)
    return {"held": resident("VmHWM") - before, "saved": saved, "gradients": form.trainable_bytes}


def write(policy: str, rows: int) -> None:
    sys.stdout.write(json.dumps(measure(policy, rows)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for number, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        process = get_context("fork").Process(target=write, args=(name, int(number)))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"the process of {name} ended with status {process.exitcode}")
