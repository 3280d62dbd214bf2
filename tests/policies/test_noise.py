"""Noise is a pure function of its key: same bits in Python, numpy and torch, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrhythm.policies import noise
from polyrhythm.specs.hashing import library_seed, mix, mix_array, split_seed

EDGES = [0, 1, 2, -1, 7919, 2**62, 2**63 - 1, -(2**63)]


def test_mix_is_what_it_was() -> None:
    assert (mix(), mix(0), mix(4, 3)) == (0, 7070836379803831727, 2013094035737070645)


def test_numpy_and_torch_have_the_bits_of_python() -> None:
    keys, steps = np.meshgrid(np.array(EDGES, np.int64), np.array(EDGES, np.int64))
    expected = [[mix(int(k), int(s)) for k, s in zip(*pair, strict=True)] for pair in zip(keys, steps, strict=True)]
    assert mix_array(keys, steps).tolist() == expected
    assert noise.mix_tensor(torch.tensor(EDGES)).tolist() == [mix(key) for key in EDGES]
    assert noise.words(torch.tensor(EDGES), 3, stream=5).tolist() == [
        [mix(key ^ mix(5, i)) for i in range(3)] for key in EDGES
    ]


def test_library_seeds_have_31_bits_and_keep_evaluations_apart() -> None:
    rng = np.random.default_rng(0)
    seeds = [int(seed) for seed in rng.integers(2**63 - 1, size=20_000)]
    trained = [library_seed(split_seed(seed, held_out=False)) for seed in seeds]
    evaluated = [library_seed(split_seed(seed, held_out=True)) for seed in seeds]
    assert 0 <= min(trained) < max(trained) < 2**30 <= min(evaluated) < max(evaluated) < 2**31
    pairs = [len(found) - len(set(found)) for found in (trained, evaluated)]
    assert max(pairs) < 2, "about n²/2^31 = 0.2 pairs are alike"
    assert [library_seed(seed) for seed in (0, 7, 2**30 - 1)] == [0, 7, 2**30 - 1]
    assert (library_seed(2**30), library_seed(2**62)) == (185_276_699, 2_065_550_767)


def test_mix_array_takes_scalars() -> None:
    assert mix_array(np.array([4]), 3).tolist() == [mix(4, 3)]
    assert int(mix_array(np.int64(4), np.int64(3))) == mix(4, 3)


@pytest.mark.parametrize("draw", [noise.uniform, noise.normal])
def test_a_row_draws_the_same_whoever_shares_its_batch(draw: object) -> None:
    keys = torch.arange(64) * 7919
    full = draw(keys, 6)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(keys[order], 6), full[order])
    assert torch.equal(draw(keys[5:6], 6), full[5:6])
    assert torch.equal(draw(keys, 3), full[:, :3])
    assert not torch.equal(draw(keys, 6, stream=1), full)


def test_a_key_of_content_is_the_rows_own_and_changes_with_every_bit() -> None:
    rows = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0))
    keys = noise.content_keys(rows)
    assert keys.unique().numel() == 40
    assert torch.equal(noise.content_keys(rows[7:9].clone()), keys[7:9])
    nudged = torch.nextafter(rows, rows + 1.0)
    for entry in range(6):
        other = rows.clone().flatten(1)
        other[:, entry] = nudged.flatten(1)[:, entry]
        assert not (noise.content_keys(other) == keys).any()
    assert not (noise.content_keys(rows.flip(2)) == keys).any()


def test_words_do_not_repeat() -> None:
    words = torch.cat([noise.words(torch.arange(1000), 50, stream) for stream in (0, 1)])
    assert words.unique().numel() == words.numel()
    assert int(words.min()) >= 0


def test_moments() -> None:
    keys = torch.arange(20_000)
    uniform, normal = (draw(keys, 10).double() for draw in (noise.uniform, noise.normal))
    assert 0.0 < uniform.min() < 1e-4
    assert 1.0 - 1e-4 < uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 0.003
    assert abs(uniform.var() - 1 / 12) < 0.001
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1.0) < 0.015
    assert abs((normal**4).mean() - 3.0) < 0.1


def test_neighbours_are_uncorrelated() -> None:
    normal = noise.normal(torch.arange(20_000), 4)
    correlations = torch.corrcoef(torch.cat((normal[:-1].T, normal[1:].T)))
    assert (correlations - torch.eye(8)).abs().max() < 0.03


def test_uniform_ends_stay_open_and_exact() -> None:
    largest = torch.tensor(2**23 - 1).to(torch.float32).add_(0.5).mul_(2.0**-23)
    assert 1.0 - float(largest) == 2.0**-24


def test_result_dtypes_and_shapes() -> None:
    for draw in (noise.uniform, noise.normal):
        assert draw(torch.arange(5), 3).shape == (5, 3)
        assert draw(torch.arange(5), 3).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_has_the_bits_of_the_cpu() -> None:
    keys = torch.tensor(EDGES)
    assert torch.equal(noise.words(keys.cuda(), 8).cpu(), noise.words(keys, 8))
    assert torch.equal(noise.uniform(keys.cuda(), 8).cpu(), noise.uniform(keys, 8))
    torch.testing.assert_close(noise.normal(keys.cuda(), 8).cpu(), noise.normal(keys, 8), rtol=1e-5, atol=1e-5)


def test_a_stream_has_the_draws_of_its_key_in_any_order() -> None:
    key = 2**62 + 7
    expected = noise.uniform(torch.tensor([key]), 200)[0].tolist()
    stream = noise.UniformStream(key)
    assert [stream.at(i) for i in (0, 1, 63, 64, 199, 5)] == [expected[i] for i in (0, 1, 63, 64, 199, 5)]
