"""Parts of a state that GR00T takes in another form: sines and cosines of angles, rotations by their first two rows.

Rotations as in PyTorch3D, whose matrices the release takes: quaternions with the real part first, Euler angles about
moving axes (r, p, y: x, y, z) in the order of their name, and 6D (Zhou et al. 2019) as two rows of the matrix.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

SIN_COS, EULER = "sin_cos", "euler_angles_"
#: Entries of a rotation in 6D.
_SIX = 6
#: Rotations that can be given in 6D, and their entries.
ROTATIONS = {"quaternion": 4, "axis_angle": 3, "matrix": 9}
ROTATIONS |= {f"{EULER}{''.join(order)}": 3 for order in permutations("rpy")}


class StatePart(NamedTuple):
    """width: its entries in the environment's state. form: "" as they are, `sin_cos`, or the rotation's form."""

    width: int
    form: str

    @property
    def taken(self) -> int:
        """Entries that the network takes."""
        return {"": self.width, SIN_COS: 2 * self.width}.get(self.form, _SIX)


def in_other_form(state: Tensor, parts: tuple[StatePart, ...]) -> Tensor:
    """A state [B,D] of these parts as the network takes it."""
    pieces = zip(state.split([part.width for part in parts], dim=1), parts, strict=True)
    return torch.cat([_taken(x, part.form) for x, part in pieces], dim=1)


def _taken(x: Tensor, form: str) -> Tensor:
    if not form:
        return x
    if form == SIN_COS:
        return torch.cat((x.sin(), x.cos()), dim=1)
    return _matrix(x, form)[:, :2].flatten(1)


def _matrix(x: Tensor, form: str) -> Tensor:
    """Rotation matrices [B,3,3] of [B,width]."""
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
    """The rotation of a quaternion (real [B,1], axis [B,3]), scale 2/|q|²: I + scale·(real·[a]× + [a]×²)."""
    zero = torch.zeros_like(axis[:, 0])
    x, y, z = axis.unbind(1)
    cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).reshape(-1, 3, 3)
    eye = torch.eye(3, dtype=axis.dtype, device=axis.device)
    return eye + scale.unsqueeze(2) * (real.unsqueeze(2) * cross + cross @ cross)
