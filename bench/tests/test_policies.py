"""The benchmark of the published policies: what is compared is alike, what cannot run is said, the page has it all."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm_bench.cases import policies, policies_page
from polyrhythm_bench.cases.policy_weights import measure_weights
from polyrhythm_bench.cli.bench import check_packages

#: Largest excess of the reference's flops in acting: OpenVLA-OFT's scores all words, GR00T's repeats keys and values.
LIKE = {"pi0": 0.001, "pi05": 0.001, "openvla_oft": 0.2, "groot_n1d5": 0.2}


@cache
def measured(kind):
    return policies.run(types=(kind,), rows=(2,), repeats=1, device="cpu")


KINDS = [pytest.param(kind, marks=[] if kind == "pi0" else long(8, kind)) for kind in policies.TYPES]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_same_network(kind):
    part = measured(kind)["parts"][f"{kind}, tiny"]
    act, train = part["modes"]["act 2"], part["modes"][f"train {policies.TRAIN_ROWS}"]
    assert -0.001 <= act["reference_gflop"] / act["gflop"] - 1 <= LIKE[kind]
    assert -0.001 <= train["reference_gflop"] / train["gflop"] - 1 <= LIKE[kind]
    assert act["reference_weights_mb"] == pytest.approx(act["weights_mb"], rel=0.05)
    assert part["reference_parameters_m"] == pytest.approx(part["parameters_m"], rel=0.15)
    assert train["gflop"] > act["gflop"] * policies.TRAIN_ROWS / 2
    assert train["peak_mb"] > act["peak_mb"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_says_what_it_is_worth(kind):
    for mode in measured(kind)["parts"][f"{kind}, tiny"]["modes"].values():
        assert mode["actions_per_s"] == pytest.approx(1e3 * mode["rows"] * policies.CHUNK / mode["ms"])
        assert mode["of_roofline"] > 0
        assert mode["ratio"] == pytest.approx(mode["ms"] / mode["reference_ms"]), "of a single turn"


def test_full_size_on_a_cpu_is_left_out_in_one_sentence_each():
    found = policies.run(sizes=("released",), device="cpu")
    assert len(found["left_out"]) == len(policies.TYPES)
    assert found["left_out"][0].startswith("pi0, released: left out, because")
    assert not found["parts"]


def test_the_page_has_parts_and_what_was_left_out(tmp_path):
    sentence = "pi0, released: left out, because there is no GPU"
    (path,) = policies_page.write({**measured("pi0"), "left_out": [sentence]}, tmp_path)
    text = path.read_text()
    assert "## pi0, tiny" in text
    assert "| act, 2 |" in text
    assert f"- {sentence}." in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_a_version_is_applied_through_both_ways():
    module = torch.nn.Linear(256, 256)
    before = module.weight.detach().clone()
    found = measure_weights(module, 2)
    assert torch.equal(module.weight, before)
    assert found["mb"] == pytest.approx((256 * 256 + 256) * 4 / 1e6, rel=0.01)
    for name in ("publish_ms", "stage_ms", "apply_ms", "direct_ms", "plain_ms", "ratio", "apply_ratio"):
        assert found[name] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device here"):
        policies.choose_device("cuda")


def test_a_missing_package_is_told_with_the_command_that_installs_it():
    check_packages()
    with pytest.raises(ConfigError, match=r"the package no_such_package is not installed; run: .*pip.*vla"):
        check_packages(["no_such_package"])


def test_only_known_types(capsys):
    assert main(["bench", "policies", "--types", "pi1"]) == 2
    assert "--types pi1: it is not one of pi0, pi05" in capsys.readouterr().err


@long(6, "the command itself")
def test_the_command_prints_json(capsys):
    words = ["bench", "policies", "--types", "pi0", "--sizes", "tiny", "--rows", "1", "--repeats", "1", "--json"]
    assert main(words) == 0
    assert "act 1" in json.loads(capsys.readouterr().out)["parts"]["pi0, tiny"]["modes"]
