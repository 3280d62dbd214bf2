"""`polyrhythm policies inspect | merge | export`: released folders on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.plugins.pretrained.released import write_folder, write_hollow_folder

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.plugins.pretrained.building import NETWORK, load_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.vla.released import architecture
from polyrhythm.policies.base import as_settings
from polyrhythm.policies.form import published_state, weights_on_meta
from polyrhythm.training.checkpoint import save_state

#: Numbers in the released checkpoints.
_FULL = [
    ("pi0", 3_501_372_176),
    ("pi05", 3_616_757_520),
    ("openvla_oft", 7_541_237_184),
    ("groot_n1d5", 2_413_522_880),
]
GOLDEN = Path(__file__).parents[1] / "vla" / "golden"


def _told(capsys, *words, status=0):
    assert main(["policies", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def _refused(capsys, *words):
    assert main(["policies", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("polyrhythm: error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("folder", "kind", "horizon", "entries"),
    [
        ("pi0", "pi0", 5, 8),
        ("pi05", "pi05", 5, 8),
        ("openvla_oft", "openvla_oft", 8, 7),
        ("gr00t_n1_5", "groot_n1d5", 6, 8),
    ],
)
def test_a_folder_is_told_with_its_fit_and_memory(capsys, folder, kind, horizon, entries):
    found = _told(capsys, "inspect", GOLDEN / folder)
    assert found["architecture"] == kind
    assert found["fits"]
    assert (found["horizon"], found["action_dim"]) == (horizon, entries)
    assert found["dtypes"] == {"float32": found["parameters"]}
    assert found["file_bytes"] == 4 * found["parameters"]
    assert {"all", "expert", "lora", "head"} == set(found["trainable"])
    assert found["trainable"]["all"] > found["trainable"]["expert"] > found["trainable"]["head"]
    memory = found["memory"]
    assert memory["trainer, train: all"]["optimizer"] == 8 * found["trainable"]["all"]
    assert memory["generator"]["weights"] < found["file_bytes"]


def test_the_recipe_lines_are_yaml_with_the_robot_and_the_cameras(capsys):
    policy = yaml.safe_load(_told(capsys, "inspect", GOLDEN / "openvla_oft")["recipe"])["policy"]
    assert policy["type"] == "openvla_oft"
    assert policy["checkpoint"] == str(GOLDEN / "openvla_oft")
    assert policy["robot"] == "libero_tiny_no_noops"
    policy = yaml.safe_load(_told(capsys, "inspect", GOLDEN / "pi0")["recipe"])["policy"]
    assert list(policy["cameras"]) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert policy["robot"] == "bounds", "it has no statistics, and would be refused without"


@pytest.mark.parametrize(("kind", "numbers"), _FULL)
def test_the_full_size_is_told_from_headers_alone(tmp_path, capsys, kind, numbers):
    of = architecture(kind)
    with weights_on_meta():
        network = of.network(of.size({}, {}))
    write_hollow_folder(tmp_path, {name: x.shape for name, x in network.state_dict().items()}, shards=3)
    found = _told(capsys, "inspect", tmp_path)
    assert found["parameters"] == numbers
    assert found["fits"]
    assert found["files"] == 3
    assert found["horizon_assumed"]
    policy = yaml.safe_load(found["recipe"])["policy"]
    assert policy["tokenizer"] == "FOLDER"
    assert ("horizon" in policy) == (kind in ("pi0", "pi05"))
    assert main(["policies", "inspect", str(tmp_path)]) == 0
    assert f"{found['horizon']} (assumed: no config.json) predicted" in capsys.readouterr().out
    assert 2 * numbers <= found["memory"]["generator"]["weights"] < 2.4 * numbers
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 1e7, "the files have no content"


def test_what_does_not_fit_is_told_with_both_shapes(tmp_path, capsys):
    state = load_file(GOLDEN / "pi0" / "weights.safetensors")
    del state["action_out_proj.bias"]
    query = "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.q_proj.weight"
    state[query], state["ghost"] = torch.ones(64, 33), torch.ones(1)
    config = json.loads((GOLDEN / "pi0" / "config.json").read_text())
    found = _told(capsys, "inspect", write_folder(tmp_path, state, prefix="model.", config=config), status=1)
    assert not found["fits"]
    assert found["missing"] == ["action_out_proj.bias"]
    assert found["unexpected"] == ["ghost"]
    assert found["reshaped"] == {query: [[64, 32], [64, 33]]}
    assert main(["policies", "inspect", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert found["recipe"] == ""
    assert "policy:" not in said
    assert "no config.json" not in said
    assert f"1 tensor of another shape ({query} is [64, 33], [64, 32] expected)" in said


def test_a_missing_config_is_named_where_nothing_fits(tmp_path, capsys):
    of = architecture("pi0")
    with weights_on_meta():
        shapes = {name: x.shape for name, x in of.network(of.size({}, {})).state_dict().items()}
    write_hollow_folder(tmp_path, dict(list(shapes.items())[1:]), shards=1)
    assert "it has no config.json" in _told(capsys, "inspect", tmp_path, status=1)["misfit"]


def test_a_run_in_place_of_a_checkpoint_is_told_how_to_export_it(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "policy.pt").touch()
    assert f"polyrhythm policies export {tmp_path} --out NEW" in _refused(capsys, "inspect", tmp_path)


def test_robots_of_all_layouts_are_found(tmp_path, capsys):
    shutil.copytree(GOLDEN / "pi0", tmp_path / "x")
    for name in ("assets/physical-intelligence/libero/norm_stats.json", "assets/droid/norm_stats.json"):
        (tmp_path / "x" / name).parent.mkdir(parents=True)
        (tmp_path / "x" / name).write_text("{}")
    (tmp_path / "x" / "experiment_cfg").mkdir()
    (tmp_path / "x" / "experiment_cfg" / "metadata.json").write_text(json.dumps({"gr1": {"modalities": {}}}))
    found = _told(capsys, "inspect", tmp_path / "x")
    assert found["robots"] == ["droid", "physical-intelligence/libero", "gr1"]
    assert "one of droid, physical-intelligence/libero, gr1" in found["recipe"]


def test_statistics_without_a_key_are_one_robots(tmp_path, capsys):
    """lerobot's: a folder is of one robot."""
    shutil.copytree(GOLDEN / "pi0", tmp_path / "x")
    assert main(["policies", "inspect", str(tmp_path / "x")]) == 0
    assert "none: no normalisation statistics were found" in capsys.readouterr().out
    (tmp_path / "x" / "meta").mkdir()
    (tmp_path / "x" / "meta" / "stats.json").write_text("{}")
    found = _told(capsys, "inspect", tmp_path / "x")
    assert (found["robots"], found["statistics"]) == ([], ["meta/stats.json"])
    assert "robot:" not in found["recipe"]
    assert main(["policies", "inspect", str(tmp_path / "x")]) == 0
    assert "one without a key: leave policy.robot out" in capsys.readouterr().out


def test_hashed_words_are_told_as_the_tokenizer(tmp_path, capsys):
    shutil.copytree(GOLDEN / "pi0", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert _told(capsys, "inspect", tmp_path / "x")["tokenizer"] != "words"
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"polyrhythm": {"tokenizer": "words"}}))
    assert _told(capsys, "inspect", tmp_path / "x")["tokenizer"] == "words"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "nowhere"], "checkpoint = nowhere: there is no such folder"),
        (["inspect"], "policies inspect takes one folder, 0 are named"),
        (["inspect", "a", "--recipe", "reach"], "--recipe = reach: policies inspect takes none"),
        (["merge", "a", "--base", "b"], "policies merge needs --out"),
        (["merge", "a", "--out", "b"], "a: it holds no adapter_config.json"),
        (["export", "nowhere", "--out", "b"], "nowhere is not there"),
        (["inspct", "nowhere"], "policies inspct: no such policy or command; did you mean inspect?"),
        (["gaussian", "--out", "b"], "--out = b: it belongs to polyrhythm policies merge"),
    ],
)
def test_wrong_words_are_one_sentence(capsys, words, said):
    assert said in _refused(capsys, *words)


def _run(folder, kind, weights, **policy):
    section = {"type": kind, "checkpoint": str(GOLDEN / kind), **policy}
    folder.mkdir()
    save_state({"policy": weights, "config": {"policy": section}, "version": 7}, folder / "policy.pt")
    return folder


def _network(folder, kind):
    return load_network(architecture(kind), Checkpoint.open(folder), device="cpu")


def test_a_run_is_exported_into_the_layout_of_its_checkpoint(tmp_path, capsys):
    weights = {NETWORK + name: x for name, x in _network(GOLDEN / "pi0", "pi0").state_dict().items()}
    weights["critic.weight"] = torch.ones(1, 3)
    told = _told(capsys, "export", _run(tmp_path / "run", "pi0", weights), "--out", tmp_path / "out")
    assert told["exported"] == "network"
    assert told["version"] == 7
    for path in (GOLDEN / "pi0").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert _told(capsys, "inspect", tmp_path / "out")["ours"] == ["critic.weight"]


def test_adapters_of_a_run_are_exported_inspected_and_merged(tmp_path, capsys, caplog):
    name = "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj"
    network = _network(GOLDEN / "pi0", "pi0")
    a, b = torch.randn(2, 32), torch.randn(64, 2)
    weights = {
        f"network.{name}.lora_A.default.weight": a,
        f"network.{name}.lora_B.default.weight": b,
        "network.action_out_proj.bias": torch.full((8,), 5.0),
    }
    run = _run(tmp_path / "run", "pi0", weights, lora={"rank": 2, "alpha": 8.0, "also": ["action_out_proj.*"]})
    assert _told(capsys, "export", run, "--out", tmp_path / "a")["exported"] == "adapters"
    told = _told(capsys, "inspect", tmp_path / "a")
    assert told["modules"] == [name]
    assert (told["rank"], told["alpha"], told["base"]) == (2, 8.0, str(GOLDEN / "pi0"))
    assert told["whole tensors"] == 2, "peft saves whole modules: the bias that was trained, and the weight"
    broken = load_file(GOLDEN / "pi0" / "weights.safetensors")
    del broken["action_in_proj.bias"]
    config = json.loads((GOLDEN / "pi0" / "config.json").read_text())
    other = write_folder(tmp_path / "broken", broken, config=config)
    words = ["merge", tmp_path / "a", "--out", tmp_path / "merged"]
    assert "action_in_proj.bias" in _refused(capsys, *words, "--base", other)
    caplog.clear()
    assert f"only where the command names it; add --base {GOLDEN / 'pi0'}" in _refused(capsys, *words)
    assert _told(capsys, *words, "--base", GOLDEN / "pi0")["merged"] == 1
    assert "were trained on" not in caplog.text
    shutil.copytree(GOLDEN / "pi0", tmp_path / "copy")
    again = [*map(str, words[:2]), "--out", str(tmp_path / "again"), "--base", str(tmp_path / "copy")]
    assert main(["policies", *again]) == 0
    assert "1 matrix" in capsys.readouterr().out
    assert f"the adapters were trained on {GOLDEN / 'pi0'}" in caplog.text
    merged = _network(tmp_path / "merged", "pi0").state_dict()
    expected = network.state_dict() | {"action_out_proj.bias": torch.full((8,), 5.0)}
    expected[f"{name}.weight"] = expected[f"{name}.weight"] + 4.0 * (b @ a)
    for key, tensor in expected.items():
        torch.testing.assert_close(merged[key], tensor)
    assert set(load_file(tmp_path / "merged" / "weights.safetensors")) == set(expected)


def test_a_policy_without_a_released_layout_is_exported_by_its_own_names(tmp_path, capsys):
    shared = torch.arange(4.0)
    run = _run(tmp_path / "run", "gaussian", {"x": torch.ones(1), "y": shared[:2], "z": shared[:2]})
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"exported": "policy", "version": 7, "out": str(tmp_path / "out")}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {"x": [1.0], "y": [0.0, 1.0], "z": [0.0, 1.0]}
    settings = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert (settings["policy"]["type"], settings["version"]) == ("gaussian", 7)
    said = _refused(capsys, "export", run, "--out", tmp_path / "o", "--base", GOLDEN / "pi0")
    assert "policy.type = gaussian has no released layout; leave it out" in said
    assert "it exists; name a new folder" in _refused(capsys, "export", run, "--out", tmp_path / "out")


def test_a_run_that_cannot_be_exported_is_one_sentence(tmp_path, capsys):
    run = _run(tmp_path / "b", "pi0", {"network.x.lora_A.weight": torch.ones(1)}, checkpoint="")
    assert "has adapters on a network from a seed" in _refused(capsys, "export", run, "--out", tmp_path / "o")
    run = _run(tmp_path / "c", "pi05", {"x": torch.ones(1)})
    said = _refused(capsys, "export", run, "--out", tmp_path / "o", "--base", GOLDEN / "pi0")
    assert "policy.type = 'pi05', but" in said


_GEMMA = {"head_dim": 16, "expert_width": 32, "expert_mlp": 48}
_SIZES = {"pi0": _GEMMA, "pi05": _GEMMA, "groot_n1d5": {"dit_width": 32, "dit_layers": 2, "hidden": 24}}


@pytest.mark.parametrize("kind", _SIZES)
def test_a_policy_from_a_seed_becomes_a_folder_that_acts_alike(tmp_path, capsys, kind):
    small = {"width": 32, "mlp": 48, "layers": 2, "heads": 2, **_SIZES[kind]}
    small |= {"vision_width": 32, "vision_layers": 1, "vision_heads": 2, "image": 28}
    section = {"type": kind, "size": small, "chunk": 2, "dtype": "float32", "train": "expert"}
    config = load_config("quickstart", [f"policy={json.dumps(section)}"])
    spec = env_settings(config).spec()
    policy = as_settings(config.policy).build(spec, seed=config.seed, device="cpu", role="train")
    with torch.no_grad():
        next(p for p in policy.network.parameters() if p.requires_grad).add_(0.1)
    (tmp_path / "run").mkdir()
    save_policy(published_state(policy), config, tmp_path / "run" / "policy.pt", 3, spec)
    assert _told(capsys, "export", tmp_path / "run", "--out", tmp_path / "out")["exported"] == "network"
    found = _told(capsys, "inspect", tmp_path / "out")
    assert found["architecture"] == kind
    assert found["fits"]
    again = load_config("quickstart", [f"policy={json.dumps(section | {'checkpoint': str(tmp_path / 'out')})}"])
    other = as_settings(again.policy).build(spec, seed=99, device="cpu", role="act")
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in policy.state_dict().items())
    obs = {"image": torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8), "proprio": torch.rand(2, 4)}
    obs |= {"instruction": torch.tensor([0, 3]), "progress": torch.rand(2)}
    given = obs, torch.ones(2, dtype=torch.bool), torch.tensor([1, 2])
    torch.testing.assert_close(policy.act(*given).actions, other.act(*given).actions, atol=1e-5, rtol=0)
