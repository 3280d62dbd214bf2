"""The tiny VLA's heads: what the default one keeps of old, and what is particular to flow matching."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.built import built
from tests.long import long
from torch import Tensor, nn

from polyrhythm.policies.flow_matching import FlowMethod, FlowNoise, FlowSde, Ode
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.tiny_vla.heads import FlowMatchingSettings
from polyrhythm.policies.tiny_vla.policy import TinyVla, TinyVlaSettings, Trunk, word_table
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

TASKS = (Task("push", "push the red block"), Task("close", "close the door"))
SPEC = EnvSpec(
    {"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((4,), "float32")},
    ActionSpec("continuous", 2, low=(-1.0, 0.0), high=(1.0, 4.0)),
    TASKS,
    50,
)
METHODS = (Ode(), FlowSde(noise=2.0), FlowNoise())


def flow(method: FlowMethod) -> TinyVla:
    return built(TinyVlaSettings(head=FlowMatchingSettings(method=method)), SPEC)


def observations(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 256, (n, 16, 16, 3), generator=generator, dtype=torch.uint8),
        "proprio": torch.randn(n, 4, generator=generator),
        INSTRUCTION: torch.arange(n) % 2,
        PROGRESS: torch.zeros(n),
    }


def test_a_seed_draws_the_bins_head_last() -> None:
    """A run of an older version begins with the same parameters: the numbers are drawn in the same order."""
    with seeded(7):
        size = TinyVlaSettings()
        trunk = Trunk((16, 16), 4, word_table(TASKS, 8, 256), queries=5, size=size)
        bins = nn.Linear(64, 32)
        critic = nn.Sequential(nn.Linear(65, 64), nn.Tanh(), nn.Linear(64, 1))
        nn.init.normal_(bins.weight, std=0.02)
        nn.init.zeros_(bins.bias)
    expected = [*trunk.parameters(), *bins.parameters(), *critic.parameters()]
    policy = built(TinyVlaSettings(), SPEC, 7)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(policy.parameters(), expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_flow_clips_the_action_and_not_the_chain(method: FlowMethod) -> None:
    policy = flow(method)
    with torch.no_grad():
        policy.head.out.bias[0] = 0.9
    n = 64
    never, keys = torch.zeros(n, dtype=torch.bool), torch.arange(n)
    act = policy.act(observations(n), never, keys)
    middle, half = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 2.0])
    assert ((act.actions - middle).abs() <= half).all()
    if isinstance(method, FlowNoise):  # it keeps its whole chain
        raw = act.forward_inputs["chain"][:, -1].view_as(act.actions)
        assert (raw > 1).any()
        assert torch.equal(act.actions, middle + half * raw.clamp(-1, 1))


@pytest.mark.parametrize("method", METHODS)
def test_an_untrained_flow_removes_the_noise(method: FlowMethod) -> None:
    act = flow(method).act(observations(8), torch.ones(8, dtype=torch.bool), torch.arange(8))
    assert float((act.actions - torch.tensor([0.0, 2.0])).abs().max()) < 0.5


def test_supervised_draws_follow_the_actions_and_the_weights_alone() -> None:
    policy, obs = flow(FlowSde()), observations(6)
    actions = torch.rand(6, 2, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    before = torch.get_rng_state()
    loss = policy.sft_loss(obs, actions)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(policy.sft_loss(obs, actions), loss)
    halves = [policy.sft_loss({k: x[i : i + 3] for k, x in obs.items()}, actions[i : i + 3]) for i in (0, 3)]
    torch.testing.assert_close(sum(halves) / 2, loss)  # a row's draws are its own
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.head.out.weight[0, 0] += 1e-6
    assert abs((other.sft_loss(obs, actions) - loss).item()) > 1e-5  # new draws, not a nudge


@long(7, "the flow learns two modes")
def test_the_flow_learns_two_modes_where_a_mean_would_be_between_them() -> None:
    """Actions are (1, 1) or (-1, -1) in half units, whatever is seen: samples go to the two, and both entries agree."""
    policy, n = flow(FlowSde()), 64
    obs = {name: x[:1].expand(n, *x.shape[1:]) for name, x in observations(2).items()}
    sign = torch.where(torch.arange(n) % 2 == 0, 0.8, -0.8).view(-1, 1, 1)
    actions = torch.cat((sign, 2.0 + 2.0 * sign), dim=2).expand(n, 2, 2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        policy.sft_loss(obs, actions).backward()
        optimizer.step()
    drawn = policy.act(obs, torch.zeros(n, dtype=torch.bool), torch.arange(n)).actions
    first, second = drawn[..., 0].flatten(), (drawn[..., 1].flatten() - 2.0) / 2.0
    assert 0.2 < float((first > 0).float().mean()) < 0.8
    assert float((first.sign() == second.sign()).float().mean()) > 0.8
    assert float(first.abs().mean()) > 0.4  # rounding that differs by processor changes it by a tenth


def test_learned_noise_is_as_wide_as_what_the_demonstrations_leave_open() -> None:
    """The first entry is anywhere, the second always the same; the noise goes to the data in thirds of what is left."""
    policy, n = (
        TinyVlaSettings(head=FlowMatchingSettings(steps=3, method=FlowNoise())).build(
            SPEC, seed=0, device="cpu", role="train"
        ),
        64,
    )
    obs = {name: x[:1].expand(n, *x.shape[1:]) for name, x in observations(2).items()}
    anywhere = torch.linspace(-1.0, 1.0, n).view(-1, 1, 1)
    actions = torch.cat((anywhere, torch.full_like(anywhere, 3.0)), dim=2).expand(n, 2, 2)

    def stds() -> Tensor:
        """Of each step and entry [K,A]."""
        chain = policy.act(obs, torch.zeros(n, dtype=torch.bool), torch.arange(n)).forward_inputs["chain"]
        with torch.no_grad():
            network = policy.head._network(policy._forward(obs)[0])
            step = policy.head.method.step(network, 3)
            return torch.stack([step(i, chain[:, i]).std.mean((0, 1)) for i in range(3)])

    torch.testing.assert_close(stds(), torch.full((3, 2), 0.2**0.5), rtol=0.25, atol=0.0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.sft_loss(obs, actions).backward()
        optimizer.step()
    wide, narrow = stds().unbind(1)
    assert float(wide[0]) == pytest.approx(
        math.hypot(0.58 / 3, 0.24), rel=0.2
    )  # the uniform distribution's std is 0.58
    assert (narrow < 0.3).all()
    assert (wide > 1.1 * narrow).all()


def test_the_fit_of_the_noise_does_not_move_the_prediction_directly() -> None:
    policy = flow(FlowNoise())
    obs, actions = observations(6), torch.rand(6, 2, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    features, _ = policy._forward(obs)
    seen, data = policy.head.from_features(features).unsqueeze(1), actions.flatten(1).unsqueeze(1)
    policy.head._misfit(policy.head.learned, seen, data, torch.arange(6)).backward()
    moved = policy.head.out.weight.grad.abs().sum(1)
    assert moved[0] == 0
    assert moved[1] > 0
