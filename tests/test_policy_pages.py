"""The pages of docs/policies: the recipes of the paper's rows hold together, settings exist, memory is as they say."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest
import yaml
from tests.long import long

from polyrhythm.config.load import load_config
from polyrhythm.config.registry import settings_class
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import check_form, examine
from polyrhythm.plugins.memory_estimate.needs import memory_by_station

PAGES = Path(__file__).parents[1] / "docs" / "policies"
_MEMORY = re.compile(r"^\| (?:(?P<name>π0(?:\.5)?) \| )?(?P<numbers>[\d.]+(?: \| [\d.]+){4}) \|$", re.MULTILINE)
_ENV = {"type": "metaworld", "tasks": ["reach-v3", "push-v3"]}
#: Page -> its rows of memory in order.
_TYPES = {"pi0": ("pi0", "pi05"), "openvla_oft": ("openvla_oft",), "groot_n1d5": ("groot_n1d5",)}


#: The paper's rows, and whether the simulator's settings can be checked without its package.
ROWS = {"metaworld_pi0": True, "libero_groot": True, "libero_oft": True, "maniskill_pi05": False, "robocasa_pi0": False}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_paper_is_in_order_but_for_what_is_missing(name: str) -> None:
    """With Meta-World in place of a simulator that is asked for its sizes."""
    config = load_config(name)
    if not ROWS[name]:
        config = config.model_copy(update={"env": settings_class("env", "metaworld")(**_ENV)})
    found = [finding for _, finding in examine(config, "machine")]
    assert [finding for finding in found if finding.state == "failed"] == []
    missing = [finding.detail for finding in found if finding.state == "missing"]
    assert f"checkpoint = {config.policy.checkpoint}: there is no such folder" in missing
    assert {"policy", "objective", "memory by station"} <= {finding.name for finding in found}


@pytest.mark.parametrize("name", ROWS)
def test_a_tiny_variant_differs_in_size_alone(name: str) -> None:
    whole, tiny = load_config(name), load_config(f"{name}_tiny")
    assert tiny.training.versions == 2
    assert (tiny.env.type, tiny.algorithm) == (whole.env.type, whole.algorithm)
    same = ("type", "chunk", "gripper", "turn_images")
    assert [getattr(tiny.policy, field) for field in same] == [getattr(whole.policy, field) for field in same]
    if ROWS[name]:
        assert [finding for _, finding in examine(tiny, "machine") if finding.state == "failed"] == []
        assert not whole.policy.turn_images, "the environment has turned them"


#: Row -> its page and the line after which its comparison with the paper and the released code stands.
_COMPARED = {
    "metaworld_pi0": ("pi0", "metaworld_col_aa_env512_pipe4.yaml"),
    "maniskill_pi05": ("pi0", "maniskill_hyb62_aa_env3264_pipe2.yaml"),
    "robocasa_pi0": ("pi0", "robocasa_col_aa_env160_pipe2.yaml"),
    "libero_groot": ("groot_n1d5", "libero_col_aa_env256_pipe4.yaml"),
    "libero_oft": ("openvla_oft", "libero_spatial_grpo_openvlaoft.yaml"),
}
_SETTING = re.compile(r"\| `([\w.]+)` \| ([^|]+) \|")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_numbers_that_its_page_compares(name: str) -> None:
    page, file = _COMPARED[name]
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    table = text.partition(file)[2].partition("|---|")[2].partition("\n\n")[0]
    compared = {path: yaml.safe_load(value) for path, value in _SETTING.findall(table)}
    assert len(compared) > 25
    found = load_config(name).model_dump(mode="json")
    for path, value in compared.items():
        assert reduce(lambda tree, key: tree[key], path.split("."), found) == value, path


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page == "groot_n1d5" else long(4, f"plans of {page}")) for page in _TYPES]
)
def test_the_memory_of_a_page_is_what_its_command_says(page: str) -> None:
    rows = [found["numbers"] for found in _MEMORY.finditer((PAGES / f"{page}.md").read_text(encoding="utf-8"))]
    assert len(rows) == len(_TYPES[page])
    for kind, row in zip(_TYPES[page], rows, strict=True):
        parts = ("all", "expert", "lora", "head")
        found = [_memory(kind, train) for train in parts]
        told = [f"{found[0][0]:.1f}", *(f"{trainer:.1f}" for _, trainer in found)]
        assert row.split(" | ") == told, kind


def _memory(kind: str, train: str) -> tuple[float, float]:
    """GB of a generator and of the trainer."""
    policy = f"policy={{type: {kind}, size: released, chunk: 5, train: {train}}}"
    config = load_config("quickstart", [policy])
    spec = env_settings(config).spec()
    memory = memory_by_station(config, spec, check_form(config, spec))
    return sum(memory["generator-0"].values()) / 1e9, sum(memory["trainer"].values()) / 1e9


@pytest.mark.parametrize("page", _TYPES)
def test_settings_in_the_text_of_a_page_exist(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    traps = text.partition("## Traps\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:policy\.)?([a-z_]+)(?:: [^`]+)?`", traps))
    fields = set().union(*(settings_class("policy", kind).model_fields for kind in _TYPES[page]))
    values = {"rlinf", "official", "lora", "head", "new_embodiment", "gr1", "oxe_droid", "libero_franka"}
    values |= {"agibot_genie1", "maniskill_widowx", "padding_value", "pi0_libero", "variant"}
    assert named <= fields | values, named - fields - values
    assert len(named & fields) >= 3
