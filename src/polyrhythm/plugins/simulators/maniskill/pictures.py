"""Pictures of ManiSkill's cameras: their size, and poses of cameras that an episode's appearance moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.simulators.variation import Appearance


def as_numpy(value: Any) -> NDArray[Any]:
    """A tensor on any device, or a number, as an array that may share its memory."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def resized(pictures: Any, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize [B,H,W,3] to uint8 images of this height and width, bilinearly like Pillow."""
    pictures = as_numpy(pictures)
    if pictures.shape[1:3] == size:
        found: NDArray[np.uint8] = pictures.astype(np.uint8, copy=False)
        return found
    from PIL import Image

    whole = (Image.fromarray(one.astype(np.uint8)) for one in pictures)
    return np.stack([np.asarray(one.resize((size[1], size[0]), Image.Resampling.BILINEAR)) for one in whole])


def resized_tensor(pictures: Any, size: tuple[int, int]) -> Any:
    """As `resized` for tensors on any device, to one of 255 levels of Pillow's."""
    import torch

    if tuple(pictures.shape[1:3]) == size:
        return pictures.to(torch.uint8)
    planes = pictures.movedim(3, 1).to(torch.float32)
    small = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8).movedim(1, 3).contiguous()


def turned(pose: Any, appearance: Appearance) -> Any:
    """A camera pose, which looks along x with z up, moved by the appearance."""
    import sapien

    usual = pose.to_transformation_matrix().astype(np.float64)
    camera = SimpleNamespace(pos=usual[:3, 3].copy(), forward=usual[:3, 0].copy(), up=usual[:3, 2].copy())
    appearance.turn(camera)
    turned = np.eye(4)
    turned[:3, :4] = np.stack([camera.forward, np.cross(camera.up, camera.forward), camera.up, camera.pos], axis=1)
    return sapien.Pose(turned)
