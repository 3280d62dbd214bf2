"""Images reach each network exactly as its release feeds them, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.plugins.vla import parity
from torch import Tensor
from torch.nn import functional

from polyrhythm.plugins.vla import images

PREPROCESS = Path(__file__).parent / "golden" / "preprocess"
PILLOW = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}


def random_images(rows: int, height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, height, width, 3), generator=generator).to(torch.uint8)


def test_every_golden_array_of_the_preprocessing_agrees() -> None:
    lines = parity.compare(PREPROCESS)
    assert len(lines) == 21
    assert [str(line) for line in lines if not line.ok] == []
    exact = {line.name: line.error for line in lines if "resize_with_pad_56" in line.name or "bins" in line.name}
    assert len(exact) == 3
    assert set(exact.values()) == {0.0}


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [
        (48, 64, (42, 56)),
        (64, 64, (56, 56)),
        (20, 20, (56, 56)),
        (33, 90, (56, 21)),
        (64, 47, (64, 31)),
        (5, 7, (9, 3)),
    ],
)
def test_resampling_equals_pillow_bit_for_bit(
    kernel: images.Filter, height: int, width: int, size: tuple[int, int]
) -> None:
    """Sizes for which Pillow's versions agree on the order of the passes."""
    given = random_images(2, height, width)
    ours = images.resample(given, size, kernel)
    expected = [Image.fromarray(image.numpy()) for image in given]
    for image, pillow in zip(ours, expected, strict=True):
        assert np.array_equal(image.numpy(), np.asarray(pillow.resize(size[::-1], PILLOW[kernel])))


def test_a_tall_image_is_first_made_shorter_as_in_pillow_13() -> None:
    given = random_images(1, 96, 40)
    shorter = images.resample(images.resample(given, (56, 40), "bilinear"), (56, 23), "bilinear")
    narrower = images.resample(images.resample(given, (96, 23), "bilinear"), (56, 23), "bilinear")
    assert not torch.equal(shorter, narrower)
    assert torch.equal(images.resample(given, (56, 23), "bilinear"), shorter)


def test_openvla_oft_has_two_value_ranges_per_image() -> None:
    given = random_images(2, 60, 60)
    found = images.oft_images(given, 42)
    small = np.stack([np.asarray(Image.fromarray(x.numpy()).resize((42, 42), Image.BICUBIC)) for x in given])
    scaled = torch.from_numpy(small).permute(0, 3, 1, 2).double() / 255.0
    mean, std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in images.IMAGENET)
    assert (found[:, :3] - (scaled - mean) / std).abs().max() < 1e-6
    assert (found[:, 3:] - (scaled * 2.0 - 1.0)).abs().max() < 1e-6


def test_the_central_area_spans_the_square_root_of_its_share() -> None:
    """A ramp of values 0, 5, 10, ... becomes the ramp of its centre, from offset to offset + √0.9 of the way."""
    side = 41
    ramp = (torch.arange(side) * 5).to(torch.uint8).view(1, 1, side, 1).expand(1, side, side, 3).contiguous()
    found = images.central_area(ramp, 0.9)[0, 20, :, 1].double()
    first = (1.0 - 0.9**0.5) / 2.0
    expected = torch.linspace(first, 1.0 - first, side, dtype=torch.float64) * 200.0
    assert (found - expected).abs().max() <= 1.0
    assert not torch.equal(images.oft_images(ramp, side), images.oft_images(ramp, side, crop=True))


def test_groot_crops_the_sides_and_cuts_to_whole_levels() -> None:
    given = random_images(2, 64, 64)
    found = images.groot_images(given, 42)
    cut = given[:, 2:62, 2:62].permute(0, 3, 1, 2).float() / 255.0
    small = functional.interpolate(cut, (42, 42), mode="bilinear", antialias=True)
    levels = (found * 0.5 + 0.5) * 255.0
    assert (levels - levels.round()).abs().max() < 1e-3
    difference = small * 255.0 - levels
    assert difference.min() > -1e-3
    assert 0.9 < difference.max() < 1.001


@pytest.mark.parametrize(
    "function",
    [images.pi0_images, images.oft_images, lambda x, side: images.oft_images(x, side, crop=True), images.groot_images],
    ids=["pi0", "oft", "oft-crop", "groot"],
)
def test_an_image_does_not_depend_on_the_batch(function: object) -> None:
    given = random_images(5, 50, 64)
    alone = torch.cat([function(image[None], 42) for image in given])  # type: ignore[operator]
    assert torch.equal(function(given, 42), alone)  # type: ignore[operator]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_images() -> None:
    given = random_images(3, 256, 256)
    for function in (images.pi0_images, images.oft_images):
        assert (function(given, 224) - function(given.cuda(), 224).cpu()).abs().max() < 1e-6
    levels = (images.groot_images(given, 224) - images.groot_images(given.cuda(), 224).cpu()).abs() * 127.5
    assert levels.max() < 1.001
