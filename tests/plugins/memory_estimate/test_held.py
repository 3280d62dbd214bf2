"""What an update and a pass of every policy hold, by torch's own account, beside what the plan says of them."""

from __future__ import annotations

import pytest
from tests.long import long
from tests.plugins.memory_estimate.measured import CPU, SMALL, Run, act, update

from polyrhythm.config.load import load_config
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.memory_estimate.plan import Machine, Planner
from polyrhythm.runtime.devices import devices_here

#: The stated accuracy of an estimate.
ACCURACY = 0.1
#: The policy's settings in metaworld_pi0_24gb and its LoRA variant, at a size for a CPU.
EXPERT = "{type: pi0, chunk: 2, train: expert}"
LORA = "{type: pi0, chunk: 2, train: lora, gradient_checkpointing: true}"
GIB = 2**30


def _long(recipe: str, *settings: str) -> object:
    return pytest.param(recipe, list(settings), marks=long(5, "an update beside its plan"))


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("cartpole", ["policy.hidden=256", "rollout.segment_steps=16"]),
        ("quickstart", []),
        ("quickstart", [f"policy={EXPERT}", "training.optimizer.offload=true"]),
        _long("quickstart", "training.micro_batch_steps=0"),
        _long("quickstart_lm", "groups.size=2"),
        _long("reach", "policy.hidden=256"),
        _long("quickstart", f"policy={LORA}", "training.optimizer.offload=true"),
        _long("quickstart", "policy={type: pi0, chunk: 2}"),
        _long("quickstart", "policy={type: pi0, chunk: 2}", "training.micro_batch_steps=16"),
        _long("quickstart", f"policy={EXPERT}", "training.precomputed_mib=0", "algorithm.kl.coef=0.1"),
        _long("quickstart", "policy={type: pi0, chunk: 2, train: head, dtype: float32}"),
        _long("quickstart", "policy={type: pi05, chunk: 2, gradient_checkpointing: true}"),
        _long("quickstart", "policy={type: openvla_oft, chunk: 2}"),
        _long("quickstart", "policy={type: groot_n1d5, chunk: 2, train: expert}"),
    ],
)
def test_torch_counts_what_is_planned(recipe: str, settings: list[str]) -> None:
    run = Run.of(recipe, [*SMALL, *settings], CPU)
    for found in (update(run), act(run)):
        assert found.held == pytest.approx(found.planned, rel=ACCURACY)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([], marks=long(12, "passes of a full-size policy, traced")),
        pytest.param(
            ["policy.train=lora", "policy.gradient_checkpointing=true", "training.micro_batch_steps=8"],
            marks=long(20, "passes of a full-size policy with adapters, traced"),
        ),
    ],
)
def test_the_recipe_of_a_small_card_stays_below_22_gib(changed: list[str]) -> None:
    released = ["policy.checkpoint=''", "policy.tokenizer=''", "policy.size=released"]
    config = load_config("metaworld_pi0_24gb", [*released, *changed])
    planner = Planner(env_settings(config).spec(), Machine(devices_here(1), lambda _: 64 * GIB))
    host, card = planner.plan(config).devices
    assert {part.station for part in card.parts} == {"generator-0", "trainer"}
    assert card.total() < 22 * GIB
    assert host.total() < 24 * GIB
