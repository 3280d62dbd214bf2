"""The kernel of flow matching: against the formulas entry by entry in float64, and where the flow is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import pytest
import torch
from tests.long import long
from torch import Tensor

from polyrhythm.policies import flow_matching, noise
from polyrhythm.policies.flow_matching import FlowCps, FlowNoise, FlowSde, Kept, Method, Network, Ode, start_noise

SHAPE = (2, 3)
RAW = 0.3


def curved(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Some velocity and noise that no method could mistake for another's: entries mix, time enters."""
    t = t.view(-1, 1, 1)
    return torch.sin(2.0 * x + x.flip(2)) - t * x.mean((1, 2), keepdim=True), RAW + 0.5 * x * t


def slow_velocity(x: list[float], t: float) -> tuple[list[float], list[float]]:
    """`curved` of one row in Python's floats; x is [C·A]."""
    flipped = [x[c * SHAPE[1] + SHAPE[1] - 1 - a] for c in range(SHAPE[0]) for a in range(SHAPE[1])]
    mean = sum(x) / len(x)
    v = [math.sin(2.0 * x_j + f_j) - t * mean for x_j, f_j in zip(x, flipped, strict=True)]
    return v, [RAW + 0.5 * x_j * t for x_j in x]


def slow_step(x: list[float], i: int, steps: int, a: float, kind: str = "sde") -> tuple[list[float], float]:
    """Mean and std of step i of flow_sde or flow_cps (a = 0: of the ode), as the table of formulas says it."""
    t, delta = 1.0 - i / steps, 1.0 / steps
    first = 1.0 - 1.0 / steps
    sigma = a * math.sqrt(t / (1.0 - (first if i == 0 else t)))
    w0, w1, std = 1.0 - (t - delta), t - delta - sigma**2 * delta / (2.0 * t), sigma * math.sqrt(delta)
    if kind == "cps":
        w1, std = (t - delta) * math.cos(math.pi * a / 2.0), (t - delta) * math.sin(math.pi * a / 2.0)
    v, _ = slow_velocity(x, t)
    means = [w0 * (x_j - v_j * t) + w1 * (x_j + v_j * (1.0 - t)) for x_j, v_j in zip(x, v, strict=True)]
    return means, std


def slow_logprob(x: float, mean: float, std: float) -> float:
    return -((x - mean) ** 2) / (2.0 * std**2) - math.log(std) - 0.5 * math.log(2.0 * math.pi)


class Stepped(NamedTuple):
    """A method in K steps."""

    method: Method
    steps: int

    def sample(self, network: Network, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        return self.method.sample(network, self.steps, start, greedy, key)

    def evaluate(self, network: Network, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.method.evaluate(network, self.steps, kept)


def one_noisy_step(steps: int, a: float, kind: str = "sde") -> Stepped:
    return Stepped(FlowCps(noise=a) if kind == "cps" else FlowSde(noise=a), steps)


def flow_noise(steps: int, low: float, high: float, logprob: Literal["sum", "mean"] = "sum") -> Stepped:
    return Stepped(FlowNoise(min_std=low, max_std=high, logprob=logprob), steps)


def sampled(method: Stepped, network: Network = curved, rows: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    never = torch.zeros(rows, dtype=torch.bool)
    keys = torch.arange(rows) * 7919
    return method.sample(network, start_noise(SHAPE, keys), never, keys)


def approx(expected: object) -> object:
    return pytest.approx(expected, rel=2e-4, abs=2e-4)


NOISY = [(4, 0.5, "sde"), (3, 1.0, "sde"), (1, 0.7, "sde"), (4, 0.5, "cps"), (2, 0.3, "cps"), (3, 1.0, "cps")]


@pytest.mark.parametrize(("steps", "a", "kind"), NOISY)
def test_one_noisy_step_is_the_ode_elsewhere(steps: int, a: float, kind: flow_matching.Kind) -> None:
    method = one_noisy_step(steps, a, kind)
    data, kept = sampled(method)
    logprob, _ = method.evaluate(curved, kept)
    starts = noise.normal(torch.arange(5) * 7919, 6, stream=1).tolist()
    draws = noise.normal(torch.arange(5) * 7919, 6, stream=2).tolist()
    for row, (start, draw) in enumerate(zip(starts, draws, strict=True)):
        x, k = start, int(kept["step"][row])
        for i in range(steps):
            mean, std = slow_step(x, i, steps, a, kind) if i == k else slow_step(x, i, steps, 0.0)
            after = [m + std * e for m, e in zip(mean, draw, strict=True)]
            if i == k:
                assert kept["before"][row].flatten().tolist() == approx(x)
                assert kept["after"][row].flatten().tolist() == approx(after)
                expected = [slow_logprob(n, m, std) for n, m in zip(after, mean, strict=True)]
                assert logprob[row].flatten().tolist() == approx(expected)
            x = after
        assert data[row].flatten().tolist() == approx(x)


def test_the_misfit_of_learned_noise_is_that_of_what_a_step_leaves_open() -> None:
    method = FlowNoise(min_std=0.1, max_std=0.6)
    assert method.times(4, torch.zeros(1)).tolist() == [1.0, 0.75, 0.5, 0.25]
    error, raw = torch.tensor([[0.3, -0.2], [0.5, 0.0]]), torch.tensor([[0.1, -2.0], [0.0, 3.0]])
    expected = []
    for row, t in enumerate((1.0, 0.25)):  # the first goes a quarter of the way to the data, the second all of it
        for column in range(2):
            place = 0.5 * (math.tanh(raw[row, column].item()) + 1.0)
            std = math.sqrt(0.1**2 * (0.6**2 / 0.1**2) ** place)
            left = error[row, column].item() / (4 * t)
            expected.append((left**2 + 0.12**2) / (2.0 * std**2) + math.log(std))
    assert method.misfit(4, error, torch.tensor([[1.0], [0.25]]), raw).item() == approx(sum(expected) / 4)


@pytest.mark.parametrize(("error", "std"), [(0.0, 0.12), (0.3, math.sqrt(0.3**2 + 0.12**2)), (9.0, 0.6)])
def test_fitted_noise_is_as_wide_as_the_errors_and_can_still_be_learned_where_there_are_none(
    error: float, std: float
) -> None:
    method, raw = FlowNoise(min_std=0.1, max_std=0.6), torch.zeros(1, requires_grad=True)
    for _ in range(2000):
        (slope,) = torch.autograd.grad(method.misfit(1, torch.tensor([error]), torch.ones(1), raw), raw)
        raw = (raw - 0.1 * slope.clamp(-1.0, 1.0)).detach().requires_grad_()
    found = flow_matching.squashed(raw, 0.1, 0.6)
    assert found.item() == pytest.approx(std, rel=0.02)
    if error < 1.0:
        assert torch.autograd.grad(found.log(), raw)[0].item() > 0.1


def test_flow_noise_sums_over_the_start_and_all_steps() -> None:
    method = flow_noise(3, 0.1, 0.6)
    data, kept = sampled(method)
    logprob, entropy = method.evaluate(curved, kept)
    draws = noise.normal(torch.arange(5) * 7919, 18, stream=2).view(5, 3, 6).tolist()
    for row in range(5):
        x = kept["chain"][row, 0].flatten().tolist()
        assert x == noise.normal(torch.tensor([row * 7919]), 6, stream=1)[0].tolist()
        total = [slow_logprob(x_j, 0.0, 1.0) for x_j in x]
        spread = [0.5 * math.log(2.0 * math.pi * math.e)] * 6
        for i in range(3):
            mean, _ = slow_step(x, i, 3, 0.0)
            _, raw = slow_velocity(x, 1.0 - i / 3)
            place = [0.5 * (math.tanh(r) + 1.0) for r in raw]
            std = [math.sqrt(0.1**2 * (0.6**2 / 0.1**2) ** p) for p in place]
            x = [m + s * e for m, s, e in zip(mean, std, draws[row][i], strict=True)]
            for j in range(6):
                total[j] += slow_logprob(x[j], mean[j], std[j])
                spread[j] += 0.5 * math.log(2.0 * math.pi * math.e * std[j] ** 2)
        assert data[row].flatten().tolist() == approx(x)
        assert logprob[row].flatten().tolist() == approx(total)
        assert entropy[row].flatten().tolist() == approx(spread)
    of_mean = flow_noise(3, 0.1, 0.6, "mean").evaluate(curved, kept)
    torch.testing.assert_close(of_mean, (logprob / 4, entropy / 4))


def test_the_ode_takes_plain_steps_along_the_velocity() -> None:
    method = Stepped(Ode(), 4)
    data, kept = sampled(method)
    x = kept["start"]
    for i in range(4):
        x = x - 0.25 * curved(x, torch.full((5,), 1.0 - i / 4))[0]
    torch.testing.assert_close(data, x)
    reference = torch.distributions.Normal(0.0, 1.0)
    logprob, entropy = method.evaluate(curved, kept)
    torch.testing.assert_close(logprob, reference.log_prob(kept["start"]))
    torch.testing.assert_close(entropy, reference.entropy().expand_as(entropy))


def test_at_the_first_step_the_denominator_is_that_of_the_second() -> None:
    rows = flow_matching.step_coefficients(4, 0.5)
    assert rows[0] == pytest.approx([1.0, 0.25, 0.75 - 1.0 / 8.0, 0.5])  # σ² = a²·1/(1 − ¾) = 1, std = √¼
    assert rows[1][3] == pytest.approx(0.5 * math.sqrt(3.0) * 0.5)
    assert all(math.isfinite(number) for row in flow_matching.step_coefficients(1, 0.5) for number in row)
    assert flow_matching.step_coefficients(2, 0.0) == [[1.0, 0.5, 0.5, 0.0], [0.5, 1.0, 0.0, 0.0]]


def test_flow_cps_keeps_the_coefficient_of_the_noise() -> None:
    """w1² + std² = s²: old and new noise together are as strong as an ode's; at time 0 both are gone."""
    half, quarter = math.sqrt(0.5), math.pi / 4.0
    rows = flow_matching.step_coefficients(4, 0.5, "cps")
    assert rows[0] == pytest.approx([1.0, 0.25, 0.75 * half, 0.75 * half])
    assert rows[2] == pytest.approx([0.5, 0.75, 0.25 * math.cos(quarter), 0.25 * math.sin(quarter)])
    for _, w0, w1, std in rows + flow_matching.step_coefficients(5, 0.9, "cps"):
        assert math.hypot(w1, std) == pytest.approx(1.0 - w0)
    assert rows[3] == [0.25, 1.0, 0.0, 0.0]


def test_flow_cps_is_the_same_where_time_counts_towards_the_data() -> None:
    """GR00T's clock: τ = 1 − t, u = −v; the step from τ to τ + δ as RLinf writes it there (a3816b5)."""
    x, t, delta, angle = torch.linspace(-1, 1, 6).view(1, *SHAPE), 0.75, 0.25, 0.25 * math.pi
    tau, v = 1.0 - t, curved(x, torch.tensor([t]))[0]
    u = -v
    noise_end, data_end = x - u * tau, x + u * (1.0 - tau)
    wanted = (1.0 - tau - delta) * math.cos(angle) * noise_end + (tau + delta) * data_end
    row = torch.tensor(flow_matching.step_coefficients(4, 0.5, "cps")[1:2])
    mean, std = flow_matching.step(x, curved(x, row[:, 0])[0], row)
    torch.testing.assert_close(mean, wanted)
    assert std.item() == pytest.approx((1.0 - tau - delta) * math.sin(angle))


MEAN, STD = 0.7, 0.4


def exact(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """E[noise − data | x_t = x] for data N(MEAN, STD²): x_t is normal with variance t² + (1 − t)²·STD²."""
    t = t.view(-1, 1, 1)
    gain = (x - (1.0 - t) * MEAN) / (t**2 + (1.0 - t) ** 2 * STD**2)
    return t * gain - (MEAN + (1.0 - t) * STD**2 * gain), torch.zeros_like(x)


def affine(x: Callable[[float], float]) -> tuple[float, float]:
    """Offset and slope of an affine function."""
    return x(0.0), x(1.0) - x(0.0)


def moments(
    steps: int, noisy: Callable[[int], tuple[float, float | None]], kind: flow_matching.Kind = "sde"
) -> tuple[float, float]:
    """Mean and variance of the data that steps steps make of `exact`: a step is affine, so they follow exactly.

    noisy: step -> strength a of its mean, and its std where that is not the kind's.
    """
    mean, variance = 0.0, 1.0
    for i in range(steps):
        a, own = noisy(i)
        place = torch.tensor(flow_matching.step_coefficients(steps, a, kind)[i], dtype=torch.float64)

        def moved(x: float, place: Tensor = place) -> float:
            state = torch.full((1, 1, 1), x, dtype=torch.float64)
            return float(flow_matching.step(state, exact(state, place[:1])[0], place.unsqueeze(0)).mean)

        offset, slope = affine(moved)
        std = float(place[3]) if own is None else own
        mean, variance = offset + slope * mean, slope**2 * variance + std**2
    return mean, variance


ROWS = 20_000
SAMPLING_ERROR = 0.01  # four standard errors of the mean of 20,000·6 entries are below 0.006


@pytest.mark.parametrize("steps", [4, pytest.param(64, marks=long(3, "of 64 steps"))])
def test_samples_of_the_ode_and_of_one_noisy_step_have_the_moments_of_their_steps(steps: int) -> None:
    ode, _ = sampled(Stepped(Ode(), steps), exact, ROWS)
    mean, variance = moments(steps, lambda i: (0.0, None))
    assert float(ode.mean()) == pytest.approx(mean, abs=SAMPLING_ERROR)
    assert float(ode.std()) == pytest.approx(variance**0.5, abs=SAMPLING_ERROR)
    kinds: list[flow_matching.Kind] = ["sde", "cps"]
    for kind in kinds:
        method = one_noisy_step(steps, 0.5, kind)
        noisy, _ = sampled(method, exact, ROWS)
        count = steps - (kind == "cps")
        of_step = [moments(steps, lambda i, k=k: (0.5 if i == k else 0.0, None), kind) for k in range(count)]
        mean = sum(m for m, _ in of_step) / count
        variance = sum(v + m**2 for m, v in of_step) / count - mean**2
        assert float(noisy.mean()) == pytest.approx(mean, abs=SAMPLING_ERROR)
        assert float(noisy.std()) == pytest.approx(variance**0.5, abs=SAMPLING_ERROR)


def test_flow_sde_preserves_the_marginals() -> None:
    """With many steps the data have the data's moments, with noise or without it."""
    for method in (Stepped(Ode(), 64), one_noisy_step(64, 0.5)):
        data, _ = sampled(method, exact, ROWS)
        assert float(data.mean()) == pytest.approx(MEAN, abs=SAMPLING_ERROR)
        assert float(data.std()) == pytest.approx(STD, abs=SAMPLING_ERROR)


def test_noise_in_every_step_preserves_the_marginals_too() -> None:
    """The weights' correction, where it counts most: an ode's mean with the same noise would end far too wide."""
    start = noise.normal(torch.arange(ROWS), 1).view(-1, 1, 1)
    draws = noise.normal(torch.arange(ROWS), 256, stream=1).view(-1, 256, 1, 1).unbind(1)
    places = flow_matching.coefficient_table(256, 0.7, "sde", torch.float32, start.device)

    def step(i: int, x: Tensor) -> flow_matching.Normal:
        return flow_matching.step(x, exact(x, places[i, :1].expand(ROWS))[0], places[i])

    data = flow_matching.chain(step, start, draws)[:, -1]
    assert float(data.mean()) == pytest.approx(MEAN, abs=0.015)
    assert float(data.std()) == pytest.approx(STD, abs=0.015)


def test_samples_of_flow_noise_have_the_moments_of_their_steps() -> None:
    data, _ = sampled(flow_noise(4, 0.1, 0.4), exact, ROWS)
    mean, variance = moments(4, lambda i: (0.0, 0.2))  # raw 0 is halfway in the logarithm
    assert float(data.mean()) == pytest.approx(mean, abs=SAMPLING_ERROR)
    assert float(data.std()) == pytest.approx(variance**0.5, abs=SAMPLING_ERROR)


@pytest.mark.parametrize(
    "method", [Stepped(Ode(), 8), one_noisy_step(8, 0.5), one_noisy_step(8, 0.5, "cps"), flow_noise(8, 0.1, 0.4)]
)
def test_a_greedy_row_from_the_mean_of_the_noise_is_the_mean_of_the_ode(method: Stepped) -> None:
    greedy, keys = torch.tensor([True, True, False]), torch.tensor([1, 2, 3])
    start = start_noise(SHAPE, keys)
    start[:2] = 0.0
    data, kept = method.sample(exact, start, greedy, keys)
    torch.testing.assert_close(data[:2], torch.full((2, *SHAPE), moments(8, lambda i: (0.0, None))[0]))
    assert data[2].std() > 0
    assert torch.isfinite(method.evaluate(exact, kept)[0]).all()


def test_logprob_is_torchs() -> None:
    method = one_noisy_step(4, 0.5)
    _, kept = sampled(method)
    places = torch.tensor(flow_matching.step_coefficients(4, 0.5))[kept["step"]]
    v, _ = curved(kept["before"], places[:, 0])
    mean, std = flow_matching.step(kept["before"], v, places)
    logprob, entropy = method.evaluate(curved, kept)
    reference = torch.distributions.Normal(mean, std.expand_as(mean))
    torch.testing.assert_close(logprob, reference.log_prob(kept["after"]))
    torch.testing.assert_close(entropy, reference.entropy())


@pytest.mark.parametrize("method", [one_noisy_step(3, 0.5), one_noisy_step(3, 0.5, "cps"), flow_noise(3, 0.1, 0.6)])
def test_gradients_of_the_log_prob(method: Stepped) -> None:
    _, kept = sampled(method, rows=2)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in kept.items()}

    def logprob(gain: Tensor, shift: Tensor) -> Tensor:
        def network(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            v, raw = curved(gain * x, t)
            return v + shift, raw * gain

        return method.evaluate(network, wide)[0]

    given = (torch.ones(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64))
    assert torch.autograd.gradcheck(logprob, tuple(x.requires_grad_() for x in given))


def test_the_noisy_step_is_the_rows_own_and_uniform() -> None:
    _, kept = sampled(one_noisy_step(5, 0.5), rows=10_000)
    counts = torch.bincount(kept["step"], minlength=5)
    assert len(counts) == 5
    assert float(((counts - 2000.0) ** 2 / 2000.0).sum()) < 20.0  # χ² with 4 degrees of freedom: p = 0.0005
    neighbours = torch.stack((kept["step"][:-1], kept["step"][1:])).float()
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.04


def test_flow_cps_never_draws_the_step_without_noise() -> None:
    method = one_noisy_step(4, 0.5, "cps")
    data, kept = sampled(method, rows=9_000)
    assert torch.bincount(kept["step"], minlength=4).tolist()[3] == 0
    assert kept["step"].unique().tolist() == [0, 1, 2]
    assert method.evaluate(curved, kept)[0].isfinite().all()
    assert data.isfinite().all()


def test_supervised_targets_lie_on_the_line_between_data_and_noise() -> None:
    data, draws = torch.randn(2, 4, *SHAPE, generator=torch.Generator().manual_seed(0))
    x, v = flow_matching.between(data, draws, torch.tensor(0.25))
    torch.testing.assert_close(x, 0.25 * draws + 0.75 * data)
    torch.testing.assert_close(x - 0.25 * v, data)
    torch.testing.assert_close(x + 0.75 * v, draws)


def test_half_precision_models_are_computed_in_float32() -> None:
    def half(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        v, raw = curved(x.bfloat16(), t.bfloat16())
        return v.bfloat16(), raw.bfloat16()

    for method in (Stepped(Ode(), 4), one_noisy_step(4, 0.5), one_noisy_step(4, 0.5, "cps"), flow_noise(4, 0.1, 0.6)):
        data, kept = sampled(method, half)
        logprob, entropy = method.evaluate(half, kept)
        assert data.dtype == logprob.dtype == entropy.dtype == torch.float32
