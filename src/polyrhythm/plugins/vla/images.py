"""Converts camera images to the inputs of the released vision towers: resizing, crops and value ranges.

Pure functions on the device of their input; images are uint8 [B,H,W,3] and networks take float32 [B,3,S,S]. Rows are
independent. `resample` equals Pillow's `Image.resize` bit for bit on every device, because it repeats Pillow's integer
arithmetic; torch's antialiased interpolation of uint8 differs by one level in 0.3 to 7% of the values (up to 2 levels
for bicubic), and does not support uint8 on a GPU.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polyrhythm.policies.constants import kept

Filter = Literal["bilinear", "bicubic", "lanczos"]
#: How images that do not have a network's size are resized: by the code of a release.
Resizing = Literal["openpi", "lerobot", "lerobot_0.4", "lerobot_0.3"]

#: What is around an image in 0..1, and whether it is in the centre (else at the lower right).
_PADDING: dict[Resizing, tuple[float, bool]] = {
    "lerobot": (0.0, True),
    "lerobot_0.4": (-1.0, True),
    "lerobot_0.3": (0.0, False),
}

#: Half-width of each filter in pixels of the smaller image.
_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
#: Pillow's weights are multiples of 2^-22.
_BITS = 22
#: Mean and standard deviation of each channel.
Colours = tuple[tuple[float, ...], tuple[float, ...]]
#: Of ImageNet, for DINOv2; SigLIP has 0.5 for both.
IMAGENET: Colours = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Colours = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def pi0_images(images: Tensor, side: int, resizing: Resizing = "openpi") -> Tensor:
    """π0's images: resized with preserved aspect ratio -> float32 [B,3,side,side] in -1..1. openpi resizes with Pillow
    before it sends an image. lerobot resizes floats in 0..1 bilinearly without antialiasing, and lerobot 0.4 pads these
    with -1, which becomes -3. Images that already have this size are the same in all."""
    if resizing == "openpi":
        return resize_with_pad(images, side, side).permute(0, 3, 1, 2).float() / 255.0 * 2.0 - 1.0
    return interpolated(images.permute(0, 3, 1, 2).float() / 255.0, side, side, *_PADDING[resizing]) * 2.0 - 1.0


def oft_images(
    images: Tensor, side: int, *, crop: bool = False, colours: tuple[Colours, Colours] = (IMAGENET, HALF)
) -> Tensor:
    """OpenVLA-OFT's images: three channels for DINOv2, then three for SigLIP -> float32 [B,6,side,side].

    Without crop: bicubic to side, as the release's image processor does. With crop, as in its evaluation of policies
    trained with random crops: Lanczos to side, then the central 90% of the area, enlarged. Deviations: the release
    rounds once less in the Lanczos step and passes the image through JPEG before it.
    """
    small = resample(images, (side, side), "lanczos" if crop else "bicubic")
    small = central_area(small, 0.9) if crop else small
    scaled = small.permute(0, 3, 1, 2).float() / 255.0
    return torch.cat([standardised(scaled, *tower) for tower in colours], dim=1)


def groot_images(images: Tensor, side: int, crop: float = 0.95) -> Tensor:
    """GR00T N1.5's images in evaluation -> float32 [B,3,side,side] in -1..1. The central `crop` of both sides, linear
    with antialiasing in float32, truncated to whole levels, mean and standard deviation 0.5. GPU interpolation may
    round differently, which can change a level by one."""
    height, width = images.shape[1:3]
    rows, columns = int(height * crop), int(width * crop)
    top, left = round((height - rows) / 2.0), round((width - columns) / 2.0)
    cut = images[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2).contiguous().float().div_(255.0)
    small = functional.interpolate(cut, (side, side), mode="bilinear", align_corners=False, antialias=True)
    levels = small.mul_(255.0).trunc_()
    return levels.div_(255.0).sub_(0.5).div_(0.5)


def standardised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(images − mean) / std per channel: [B,3,H,W]. Computed channel by channel, so that no constant is copied to
    the device."""
    channels = zip(images.unbind(1), mean, std, strict=True)
    return torch.stack([(channel - m) / s for channel, m, s in channels], dim=1)


def padded_size(images: Tensor, to_height: int, to_width: int) -> tuple[int, int, int, int]:
    """Height and width of the scaled image, and the black rows above and columns left of it."""
    height, width = images.shape[1:3]
    ratio = max(width / to_width, height / to_height)
    rows, columns = int(height / ratio), int(width / ratio)
    return rows, columns, (to_height - rows) // 2, (to_width - columns) // 2


def resize_with_pad(images: Tensor, height: int, width: int) -> Tensor:
    """Pillow's bilinear resize with preserved aspect ratio and black padding: uint8 [B,H,W,3] -> [B,height,width,3].
    openpi's client does this before it sends an image."""
    rows, columns, top, left = padded_size(images, height, width)
    small = resample(images, (rows, columns), "bilinear")
    return functional.pad(small, (0, 0, left, width - columns - left, top, height - rows - top))


def interpolated(images: Tensor, height: int, width: int, around: float, centred: bool) -> Tensor:
    """Bilinear resize without antialiasing: [B,3,H,W] float32 -> [B,3,height,width], padded with `around` on all sides,
    or only above and left. openpi's PyTorch model does this to images of other sizes in -1..1, with -1 around them."""
    rows, columns, top, left = padded_size(images.permute(0, 2, 3, 1), height, width)
    if not centred:
        top, left = height - rows, width - columns
    small = functional.interpolate(images, (rows, columns), mode="bilinear", align_corners=False).clamp(-1.0, 1.0)
    return functional.pad(small, (left, width - columns - left, top, height - rows - top), value=around)


def central_area(images: Tensor, area: float) -> Tensor:
    """Crop the centre with this share of the area and enlarge it to the full size: uint8 [B,H,W,3] -> [B,H,W,3].
    Bilinear with aligned corners in float32, like TensorFlow's crop_and_resize; back to uint8 like its
    convert_image_dtype."""
    height, width = images.shape[1:3]
    x = images.float() * (1.0 / 255.0)
    row, column = (_corner_taps(size, area, images.device) for size in (height, width))
    left, right = x.index_select(2, column[0]), x.index_select(2, column[1])
    x = left + (right - left) * column[2].view(1, 1, -1, 1)
    above, below = x.index_select(1, row[0]), x.index_select(1, row[1])
    x = above + (below - above) * row[2].view(1, -1, 1, 1)
    return (x.clamp(0.0, 1.0) * 255.5).clamp(max=255.0).to(torch.uint8)


@kept
def _corner_taps(size: int, area: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two source pixels of each pixel of the enlarged centre, and the weight of the second."""
    side = np.sqrt(np.float32(area))
    first = (np.float32(1) - side) / np.float32(2)
    step = (first + side - first) * np.float32(size - 1) / np.float32(max(size - 1, 1))
    place = first * np.float32(size - 1) + np.arange(size, dtype=np.float32) * step
    below = np.floor(place)
    with torch.inference_mode(False):
        indices = [torch.tensor(x.astype(np.int64).tolist(), device=device) for x in (below, np.ceil(place))]
        weight = torch.tensor((place - below).tolist(), dtype=torch.float32, device=device)
    return indices[0], indices[1], weight


def resample(images: Tensor, size: tuple[int, int], kernel: Filter) -> Tensor:
    """Pillow's antialiased `resize` with this filter: uint8 [B,H,W,3] -> [B,*size,3], bit for bit. The order of the two
    passes, which determines rounding, is that of Pillow 13; earlier versions always process rows first. The order
    matters for images that shrink in height by more than twice as many pixels as in width, never for square ones."""
    if images.device.type == "cpu" and len(images) > 1:  # one image at a time stays in the cache
        return torch.cat([resample(image, size, kernel) for image in images.split(1)])
    lost = [before - after for before, after in zip(images.shape[1:3], size, strict=True)]
    for axis in (1, 2) if lost[0] > max(2 * lost[1], 0) else (2, 1):
        if images.shape[axis] != size[axis - 1]:
            images = _resample_axis(images, axis, size[axis - 1], kernel)
    return images


def _resample_axis(images: Tensor, axis: int, size: int, kernel: Filter) -> Tensor:
    """One pass: each output pixel is a weighted sum of neighbours, rounded to uint8."""
    indices, weights = _taps(images.shape[axis], size, kernel, images.device)
    lines = images.transpose(1, axis).contiguous()  # whole lines are copied faster than pixels
    total = torch.full((1,), 1 << (_BITS - 1), dtype=torch.int32, device=images.device)
    for index, weight in zip(indices, weights, strict=True):
        part = lines.index_select(1, index).to(torch.int32).mul_(weight.view(1, -1, 1, 1))
        total = part.add_(total)
    return total.bitwise_right_shift_(_BITS).clamp_(0, 255).to(torch.uint8).transpose(1, axis)


@kept
def _taps(size: int, to: int, kernel: Filter, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Neighbours and integer weights of each output pixel: two tuples, by tap, of tensors [to]."""
    indices, weights = taps(size, to, kernel)
    with torch.inference_mode(False):
        return (
            tuple(torch.tensor(column.tolist(), dtype=torch.int64, device=device) for column in indices.T),
            tuple(torch.tensor(column.tolist(), dtype=torch.int32, device=device) for column in weights.T),
        )


def taps(size: int, to: int, kernel: Filter) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours [to,taps] and their weights in units of 2^-22, as Pillow computes them; unused taps weigh 0."""
    scale = size / to
    stretch = max(scale, 1.0)
    support = _SUPPORT[kernel] * stretch
    centres = (np.arange(to) + 0.5) * scale
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + support + 0.5).astype(np.int64), size)
    places = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    used = places < last[:, None]
    raw = np.where(used, _filter(kernel, (places - centres[:, None] + 0.5) * (1.0 / stretch)), 0.0)
    raw = raw * (1.0 / raw.sum(1, keepdims=True))
    weights = np.trunc(raw * (1 << _BITS) + np.where(raw < 0, -0.5, 0.5)).astype(np.int64)
    needed = (weights != 0).any(0)
    return np.where(used, places, 0)[:, needed], weights[:, needed]


def _filter(kernel: Filter, x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    if kernel == "bilinear":
        return np.maximum(1.0 - x, 0.0)
    if kernel == "bicubic":  # with parameter −0.5
        near, far = (1.5 * x - 2.5) * x * x + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
    return np.where(x < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)
