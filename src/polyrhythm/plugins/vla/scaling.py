"""Normalisation of states and actions, as each release defines it.

A `Scaling` is an affine map of every entry, with a separate map for each direction, because some releases do not
exactly invert their own. With mean m, deviation s, bounds a and b (quantiles or extremes) and the release's epsilon e:

    mean and deviation   y = (x − m)/(s + e)            x = y·(s + e) + m        openpi; lerobot's inverse has no e
    bounds               y = 2(x − a)/(b − a + e) − 1   x = (y + 1)/2·(b − a + e) + a

Computed in float64, like the statistics of the releases, so bins and golden values are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

SIN_COS, EULER = "sin_cos", "euler_angles_"
#: Entries of a rotation in 6D.
_SIX = 6
#: Rotations that can be given in 6D, and their entries.
ROTATIONS = {"quaternion": 4, "axis_angle": 3, "matrix": 9}
ROTATIONS |= {f"{EULER}{''.join(order)}": 3 for order in permutations("rpy")}


class StatePart(NamedTuple):
    """width: entries in the environment's state; form: "" for unchanged, `sin_cos`, or the form of the rotation."""

    width: int
    form: str

    @property
    def taken(self) -> int:
        return {"": self.width, SIN_COS: 2 * self.width}.get(self.form, _SIX)


def in_other_form(state: Tensor, parts: tuple[StatePart, ...]) -> Tensor:
    """Convert a state [B,D] with these parts to the network's form."""
    taken = []
    for x, part in zip(state.split([part.width for part in parts], dim=1), parts, strict=True):
        if part.form == SIN_COS:
            taken += [x.sin(), x.cos()]
        else:
            taken.append(_matrix(x, part.form)[:, :2].flatten(1) if part.form else x)
    return torch.cat(taken, dim=1)


def _matrix(x: Tensor, form: str) -> Tensor:
    """Rotation matrices [B,3,3] of rotations [B,width] in this form."""
    if form == "matrix":
        return x.reshape(-1, 3, 3)
    if form == "quaternion":
        real, axis = x[:, :1], x[:, 1:]
        return _turned(axis, real, 2.0 / x.square().sum(1, keepdim=True))
    if form == "axis_angle":
        half = 0.5 * x.norm(dim=1, keepdim=True)
        return _turned(0.5 * x * torch.sinc(half / torch.pi), half.cos(), torch.full_like(half, 2.0))
    found = torch.eye(3, dtype=x.dtype, device=x.device).expand(len(x), 3, 3)
    for letter, angle in zip(form.removeprefix(EULER), x.unbind(1), strict=True):
        axis = torch.zeros_like(x)
        axis[:, "rpy".index(letter)] = (0.5 * angle).sin()
        found = found @ _turned(axis, (0.5 * angle).cos().unsqueeze(1), torch.full_like(x[:, :1], 2.0))
    return found


def _turned(axis: Tensor, real: Tensor, scale: Tensor) -> Tensor:
    """Rotation matrix of a quaternion (real [B,1], axis [B,3]), scale 2/|q|²: I + scale·(real·[a]× + [a]×²)."""
    zero = torch.zeros_like(axis[:, 0])
    x, y, z = axis.unbind(1)
    cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).reshape(-1, 3, 3)
    eye = torch.eye(3, dtype=axis.dtype, device=axis.device)
    return eye + scale.unsqueeze(2) * (real.unsqueeze(2) * cross + cross @ cross)


Method = Literal["none", "mean_std", "quantile", "min_max", "binary"]
Floats = NDArray[np.float64]

#: Most by which an entry that never varied is scaled: the epsilon of a release.
_STILL = 1e-6
#: What becomes of an entry that never varied: divided by epsilon all the same, left as it is, or 0.
Constant = Literal["divide", "keep", "zero"]


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Normalisation of an array of D entries and its inverse. All arrays [D].

    gain, shift: y = gain·x + shift; back_gain, back_shift: x = back_gain·y + back_shift. clipped: y is clipped to
    −1..1. switch: y and x are 1 above 0.5, else 0, regardless of the other fields. method: of the first entry, for
    messages.
    """

    method: Method
    gain: Floats
    shift: Floats
    back_gain: Floats
    back_shift: Floats
    clipped: NDArray[np.bool_]
    switch: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return len(self.gain)

    def chosen(self, entries: Sequence[int]) -> Scaling:
        """The scaling of these entries, in this order."""
        index = list(entries)
        return Scaling(self.method, *(array[index] for array in self._arrays()))

    def without_padding(self, size: int) -> Scaling:
        """The scaling of the first `size` entries, if all others are constant (padding); else itself."""
        padded = self.method == "none" or bool((self.back_gain[size:] <= _STILL).all())
        return self.chosen(range(size)) if padded else self

    def joined(self, other: Scaling) -> Scaling:
        """The scaling of the concatenation of this array and the other's."""
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        return Scaling(self.method, *(np.concatenate(pair) for pair in pairs))

    def _arrays(self) -> tuple[Any, ...]:
        return self.gain, self.shift, self.back_gain, self.back_shift, self.clipped, self.switch


def identity(size: int) -> Scaling:
    return _scaling("none", np.ones(size), np.zeros(size), np.ones(size), np.zeros(size))


def switches(size: int) -> Scaling:
    return replace(identity(size), method="binary", switch=np.ones(size, bool))


def mean_std(
    mean: ArrayLike, std: ArrayLike, *, eps: float = 1e-6, back_eps: float | None = None, constant: Constant = "divide"
) -> Scaling:
    """Scale to mean 0 and deviation 1. back_eps: epsilon of the inverse, if different."""
    m, s = np.asarray(mean, np.float64), np.asarray(std, np.float64)
    divisor = s + eps
    still = (s == 0.0) & (constant != "divide")
    safe = np.where(still, 1.0, divisor)
    gain, shift = 1.0 / safe, -m / safe
    keeps = 1.0 if constant == "keep" else 0.0
    back = s + (eps if back_eps is None else back_eps)
    return _scaling("mean_std", np.where(still, keeps, gain), np.where(still, 0.0, shift), back, m)


def bounds(
    low: ArrayLike,
    high: ArrayLike,
    *,
    method: Method = "quantile",
    eps: float = 0.0,
    constant: Constant = "divide",
    mask: ArrayLike | None = None,
    clipped: bool = False,
) -> Scaling:
    """Scale low..high to −1..1. mask: the normalised entries; others are unchanged."""
    a, b = np.asarray(low, np.float64), np.asarray(high, np.float64)
    width = b - a + eps
    still = (b == a) & (constant != "divide")
    safe = np.where(still, 1.0, width)
    gain, shift = 2.0 / safe, -2.0 * a / safe - 1.0
    keeps = 1.0 if constant == "keep" else 0.0
    used = np.ones(len(a), bool) if mask is None else np.asarray(mask, bool)
    return _scaling(
        method,
        np.where(used, np.where(still, keeps, gain), 1.0),
        np.where(used & ~still, shift, 0.0),
        np.where(used, width / 2.0, 1.0),
        np.where(used, width / 2.0 + a, 0.0),
        used & clipped,
    )


def _scaling(
    method: Method,
    gain: Floats,
    shift: Floats,
    back_gain: Floats,
    back_shift: Floats,
    clipped: NDArray[np.bool_] | None = None,
) -> Scaling:
    never = np.zeros(len(gain), bool)
    return Scaling(method, gain, shift, back_gain, back_shift, never if clipped is None else clipped, never)


class Scaler(nn.Module):
    """A `Scaling` on a device. Values may have more entries (padding), which are unchanged."""

    forward_map: Tensor
    back_map: Tensor
    clipped: Tensor
    switch: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.size = scaling.size
        self.has_clipped, self.has_switch = bool(scaling.clipped.any()), bool(scaling.switch.any())
        maps = ("forward_map", (scaling.gain, scaling.shift)), ("back_map", (scaling.back_gain, scaling.back_shift))
        for name, (gain, shift) in maps:
            rows = [gain.tolist(), shift.tolist()]
            self.register_buffer(name, torch.tensor(rows, dtype=torch.float64), persistent=False)
        for name in ("clipped", "switch"):
            flags = torch.tensor(getattr(scaling, name).tolist(), dtype=torch.bool)
            self.register_buffer(name, flags, persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """x [...,D or more] in env units -> normalised, float64."""
        y = self._mapped(x, self.forward_map)
        if self.has_clipped:
            y = _with_front(y, torch.where(self.clipped, y[..., : self.size].clamp(-1.0, 1.0), y[..., : self.size]))
        return self._switched(x, y)

    def unnormalise(self, y: Tensor) -> Tensor:
        """y [...,D or more] normalised -> env units, float64."""
        return self._switched(y, self._mapped(y, self.back_map))

    def _mapped(self, x: Tensor, both: Tensor) -> Tensor:
        x = x.double()
        return _with_front(x, x[..., : self.size] * both[0] + both[1])

    def _switched(self, given: Tensor, found: Tensor) -> Tensor:
        if not self.has_switch:
            return found
        on = (given[..., : self.size] > 0.5).double()
        return _with_front(found, torch.where(self.switch, on, found[..., : self.size]))


def _with_front(x: Tensor, front: Tensor) -> Tensor:
    rest = x[..., front.shape[-1] :]
    return torch.cat((front, rest), dim=-1) if rest.shape[-1] else front
