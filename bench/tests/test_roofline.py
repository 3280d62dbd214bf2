"""What a pass is counted as: flops, bytes of weights, memory; and the least time that peaks allow."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from polyrhythm_bench.harness import roofline

CPU = torch.device("cpu")


def counted(run, *modules):
    return roofline.count(run, [p for module in modules for p in module.parameters()])


def test_a_linear_layer_behind_an_embedding():
    words, linear = nn.Embedding(1000, 64), nn.Linear(64, 128)
    ids = torch.arange(10)
    with torch.inference_mode():
        found = counted(lambda: linear(words(ids)), words, linear)
    assert found.flops == 2 * 10 * 64 * 128
    assert found.weight_bytes == 4 * (64 * 128 + 128 + 10 * 64), "of the embedding the ten rows alone"
    assert found.peak_bytes == 4 * (10 * 64 + 10 * 128)


def test_weights_that_are_read_again_count_once():
    linear = nn.Linear(64, 64, bias=False)
    x = torch.zeros(1, 64)
    with torch.inference_mode():
        found = counted(lambda: linear(linear(linear(x))), linear)
    assert found.flops == 3 * 2 * 64 * 64
    assert found.weight_bytes == linear.weight.nbytes
    assert found.peak_bytes < 3 * x.nbytes, "what nobody holds is freed"


def test_a_backward_pass_is_twice_the_forward_pass_and_keeps_activations():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.zeros(8, 64, requires_grad=True)
    forward = counted(lambda: layers(x), layers)
    both = counted(lambda: layers(x).sum().backward(), layers)
    assert both.flops == 3 * forward.flops
    assert both.peak_bytes > forward.peak_bytes


def test_attention_on_a_cpu():
    queries, keys = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 9, 8)
    forward = 2 * 2 * 4 * 6 * 9 * (8 + 8)
    with torch.inference_mode():
        assert counted(lambda: scaled_dot_product_attention(queries, keys, keys)).flops == forward
    queries.requires_grad_()
    both = counted(lambda: scaled_dot_product_attention(queries, keys, keys).sum().backward())
    assert both.flops == pytest.approx(3.5 * forward)


def test_fused_layers_count_as_their_parts():
    layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, batch_first=True, norm_first=True).eval()
    x = torch.zeros(2, 5, 32)
    with torch.inference_mode():
        found = counted(lambda: layer(x), layer)
    assert found.flops >= 2 * 10 * (4 * 32 * 32 + 2 * 32 * 128)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_least_time_is_that_of_the_scarcer_part():
    peaks = roofline.Peaks(flops_per_s=1e9, bytes_per_s=1e6)
    assert peaks.least_s(flops=2_000_000_000, nbytes=1000) == 2.0
    assert peaks.least_s(flops=1000, nbytes=3_000_000) == 3.0


def test_peaks_of_this_machine():
    peaks = roofline.measure_peaks(CPU, torch.float32)
    assert peaks.flops_per_s > 1e8
    assert peaks.bytes_per_s > 1e7
