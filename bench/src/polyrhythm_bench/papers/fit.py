"""Fits the cost model of a setup to its baseline and rollout-only rows.

The fit is the posterior mode over the logarithms of four costs. The likelihood takes a published throughput to be
within a few per cent of the simulated one. Two priors: RLinf measured that one training pass over generated data takes
a third as long as generation on the same devices, and step times of one env batch vary by some ten per cent; either may
be wrong by a factor of two. The first prior decides where rows do not separate training from stepping (a setup with one
placement only).

Deterministic: the same seed in every simulation, Levenberg-Marquardt steps with differences for derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

from polyrhythm_bench.papers.model import Costs, Sharing, simulate
from polyrhythm_bench.papers.published import PASSES, PaperRow

#: Standard deviation of the logarithm of a published throughput about the simulated one.
ROW_SPREAD = 0.04
#: Priors: training over generation, a step's noise; the factor by which either may be wrong.
TRAIN_TO_GENERATE, STEP_SPREAD, FACTOR = PASSES / 3, 0.1, 2.0
#: Chunk steps of the episodes that are simulated while fitting.
CHUNK_STEPS = 12
#: Most iterations of a search.
ITERATIONS = 25
#: Shares of a chunk step of the first row, per device: stepping, generating, training.
_START = (0.4, 0.4, 0.2)
_DIFFERENCE, _LARGEST, _ENOUGH = 0.02, 0.7, 0.02
#: Of a Levenberg-Marquardt step. Simulated throughputs are not smooth, so plain Gauss-Newton steps fail.
_LEAST_DAMPING, _ATTEMPTS = 0.1, 5

Vector = list[float]
Residuals = Callable[[Vector], Vector]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost model. misfit: sum of squared residuals, in standard deviations."""

    costs: Costs
    misfit: float


def fit(
    rows: Sequence[PaperRow],
    seed: int = 0,
    chunk_steps: int = CHUNK_STEPS,
    iterations: int = ITERATIONS,
    sharing: Sharing = "shared",
) -> Fit:
    """Fit the costs to `rows`, all of one setup, whose devices are shared so. ValueError: a row is one to predict."""
    for row in rows:
        if not row.visible:
            raise ValueError(f"row {row.name!r} is one to predict; fit baselines and rollout-only rows")
    first = rows[0]
    seconds = first.envs * first.setup.chunk / first.published
    rows_each = first.envs / len(first.generating)
    step, generate, train = (share * seconds for share in _START)
    start = [log(step), log(STEP_SPREAD), log(generate / rows_each), log(train / rows_each / first.setup.chunk)]

    def residuals(point: Vector) -> Vector:
        costs = Costs(*map(exp, point))
        rates = [simulate(row, costs, chunk_steps, seed, sharing).throughput for row in rows]
        found = [log(rate / row.published) / ROW_SPREAD for rate, row in zip(rates, rows, strict=True)]
        ratio = costs.train * first.setup.chunk / costs.generate
        found.append(log(ratio / TRAIN_TO_GENERATE) / log(FACTOR))
        found.append(log(costs.spread / STEP_SPREAD) / log(FACTOR))
        return found

    point, misfit = least_squares(residuals, start, iterations)
    return Fit(Costs(*map(exp, point)), misfit)


def least_squares(residuals: Residuals, start: Vector, iterations: int) -> tuple[Vector, float]:
    """Minimise the sum of squared residuals from `start` by Levenberg-Marquardt; return the minimum and the sum.

    A step too long in one coordinate is scaled down as a whole, which keeps its direction.
    """
    point, values, damping = start, residuals(start), _LEAST_DAMPING
    cost = _squares(values)
    for _ in range(iterations):
        slopes = [_slope(residuals, point, values, index) for index in range(len(point))]
        for _attempt in range(_ATTEMPTS):
            step = _step(slopes, values, damping)
            share = _LARGEST / max(_LARGEST, *map(abs, step))
            tried = [old + share * change for old, change in zip(point, step, strict=True)]
            found = residuals(tried)
            if _squares(found) < cost:
                break
            damping *= 6
        else:
            return point, cost
        gain, point, values, damping = cost - _squares(found), tried, found, max(_LEAST_DAMPING, damping / 4)
        cost -= gain
        if gain < _ENOUGH:
            break
    return point, cost


def _squares(values: Vector) -> float:
    return sum(value * value for value in values)


def _slope(residuals: Residuals, point: Vector, values: Vector, index: int) -> Vector:
    moved = [*point[:index], point[index] + _DIFFERENCE, *point[index + 1 :]]
    return [(new - old) / _DIFFERENCE for new, old in zip(residuals(moved), values, strict=True)]


def _step(slopes: list[Vector], values: Vector, damping: float) -> Vector:
    """Solve (JᵀJ + damping) x = -Jᵀr by elimination; slopes: the columns of J."""
    size = len(slopes)
    matrix = [
        [
            *(_dot(slopes[i], slopes[j]) + damping * (i == j) for j in range(size)),
            -_dot(slopes[i], values),
        ]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
