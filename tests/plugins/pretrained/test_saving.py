"""Saving in the released layout is bit-equal without training; adapters are peft's, saved, loaded and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.pretrained.released import TOY, ToyNetwork, ToySize, held_in, random_state, write_folder
from tests.plugins.vla.test_openvla_oft import SPEC, observations
from torch import nn

from polyrhythm.config.registry import resolve
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.adapters import Adapters, save_adapters
from polyrhythm.plugins.pretrained.adapters import merge as merge_of
from polyrhythm.plugins.pretrained.building import load_network, load_ours, save_folder
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.trial.policy_calls import sample
from polyrhythm.plugins.vla.released import architecture


class ToyPolicy(nn.Module):
    """A network, a critic of ours."""

    def __init__(self, network):
        super().__init__()
        self.network, self.critic = network, nn.Linear(2, 1)


def _policy(folder, prepare=None):
    return ToyPolicy(load_network(TOY, Checkpoint.open(folder), device="cpu", prepare=prepare))


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("prefix", "shards", "stored"), [("", 1, "float32"), ("model.", 3, "bfloat16")])
def test_an_untrained_policy_gives_the_same_files(tmp_path, prefix, shards, stored, held):
    state = random_state(dtype=getattr(torch, stored))
    state["vision_head.x"], state["lm_head.weight"] = torch.ones(3), state["lm_head.weight"].float()
    folder = write_folder(tmp_path / "base", state, prefix=prefix, shards=shards)
    (folder / "assets" / "x").mkdir(parents=True)
    (folder / "assets" / "x" / "norm_stats.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\0\1")
    policy = _policy(folder, held_in(held))
    save_folder(Checkpoint.open(folder), TOY, policy.state_dict(), tmp_path / "out")
    saved = _files(tmp_path / "out")
    ours = saved.pop("polyrhythm.safetensors")
    assert saved == _files(folder)
    assert ours
    again = _policy(tmp_path / "out", held_in(held))
    load_ours(again, Checkpoint.open(tmp_path / "out"))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("folder", ["pi0", "pi05", "openvla_oft", "gr00t_n1_5"])
def test_a_released_folder_is_saved_as_it_was(tmp_path, folder):
    golden = Path(__file__).parents[1] / "vla" / "golden" / folder
    kind = Checkpoint.open(golden).architecture
    network = load_network(architecture(kind), Checkpoint.open(golden), device="cpu")
    policy = ToyPolicy(network)
    save_folder(Checkpoint.open(golden), architecture(kind), policy.state_dict(), tmp_path / "out")
    saved = _files(tmp_path / "out")
    assert [name for name, _ in Checkpoint.open(tmp_path / "out").read_ours()] == ["critic.bias", "critic.weight"]
    del saved["polyrhythm.safetensors"]
    assert saved == _files(golden)


def test_what_was_trained_is_saved_and_the_rest_as_it_was(tmp_path):
    folder = write_folder(tmp_path / "base", random_state(dtype=torch.bfloat16), shards=2, prefix="model.")
    policy = _policy(folder, held_in(torch.float32))
    with torch.no_grad():
        policy.network.own += 1.0
        policy.network.lm_head.weight[0] = 7.0
    state = {name: x for name, x in policy.state_dict().items() if "blocks" not in name}  # frozen ones are not there
    save_folder(Checkpoint.open(folder), TOY, state, tmp_path / "out")
    before, after = (dict(Checkpoint.open(path).read()) for path in (folder, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"own", "lm_head.weight"}
    assert after["own"].dtype == torch.bfloat16
    assert torch.equal(after["own"], policy.network.own.bfloat16())


def test_tied_names_are_all_saved(tmp_path):
    state = random_state()
    folder = write_folder(tmp_path / "base", state | {"words.weight": state["lm_head.weight"].clone()})
    policy = _policy(folder)
    with torch.no_grad():
        policy.network.lm_head.weight.fill_(2.0)
    save_folder(Checkpoint.open(folder), TOY, policy.state_dict(), tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert (after["words.weight"] == 2.0).all()
    assert (after["lm_head.weight"] == 2.0).all()


def test_what_the_folder_has_no_place_for_is_ours(tmp_path):
    state = {name: x for name, x in random_state().items() if not name.startswith("spare")}
    folder = write_folder(tmp_path / "base", state)
    policy = _policy(folder)
    save_folder(Checkpoint.open(folder), TOY, policy.state_dict(), tmp_path / "out")
    assert _files(tmp_path / "out")["model.safetensors"] == _files(folder)["model.safetensors"]
    network = load_network(TOY, Checkpoint.open(tmp_path / "out"), device="cpu", seed=5)
    assert torch.equal(network.spare.weight, policy.network.spare.weight)
    (tmp_path / "new").touch()
    assert (tmp_path / "out" / "polyrhythm.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode


@pytest.mark.parametrize("head", ["tokens", "l1"])
def test_a_head_of_ours_loads_where_it_is_used_alone(tmp_path, caplog, head):
    """A drawn L1 head is in polyrhythm.safetensors: a policy without one does not miss it, nor warn of it."""
    folder = tmp_path / "base"
    shutil.copytree(Path(__file__).parents[1] / "vla" / "golden" / "openvla_oft", folder)
    (folder / "action_head.safetensors").unlink()
    size = {"type": "openvla_oft", "tokenizer": "words", "robot": "bounds", "chunk": 2, "dtype": "float32"}
    drawn = resolve("policy", size | {"checkpoint": str(folder), "head": "l1"}).build(
        SPEC, seed=3, device="cpu", role="train"
    )
    save_folder(Checkpoint.open(folder), architecture("openvla_oft"), drawn.state_dict(), tmp_path / "out")
    caplog.clear()
    again = resolve("policy", size | {"checkpoint": str(tmp_path / "out"), "head": head}).build(
        SPEC, seed=4, device="cpu", role="act"
    )
    own = again.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in drawn.state_dict().items() if name in own)
    assert ("network.action_head.model.fc1.weight" in own) == (head == "l1")
    assert not caplog.records


CAMERAS = {"cameras": dict.fromkeys(("ego_view", "wrist", "third"), "image"), "embodiment": 0}


@pytest.mark.parametrize(
    ("kind", "folder", "more"),
    [("pi0", "pi0", {}), ("groot_n1d5", "gr00t_n1_5", CAMERAS), ("openvla_oft", "openvla_oft", {})],
)
def test_a_value_per_action_loads_at_its_level_alone(tmp_path, kind, folder, more):
    """Policy and log-probs are those of one value per chunk, bit for bit."""

    def made(path, level, seed):
        section = {"type": kind, "checkpoint": str(path), "tokenizer": "words", "robot": "bounds", "chunk": 2}
        settings = resolve("policy", section | more | {"dtype": "float32", "value_level": level})
        assert settings.form(SPEC).value == level
        return settings.build(SPEC, seed=seed, device="cpu", role="train")

    golden = Path(__file__).parents[1] / "vla" / "golden" / folder
    trained, chunk = made(golden, "action", 3), made(golden, "chunk", 3)
    save_folder(Checkpoint.open(golden), architecture(kind), trained.state_dict(), tmp_path / "out")
    again, obs = made(tmp_path / "out", "action", 4), observations()
    act, other = sample(trained, obs), sample(again, obs)
    assert act.value.shape == (6, 2)
    assert torch.equal(act.value, other.value)
    assert torch.equal(act.logprob, sample(chunk, obs).logprob)
    with pytest.raises(ConfigError, match=r"critic\..* in polyrhythm.safetensors, .*policy\.value_level"):
        made(tmp_path / "out", "chunk", 4)


def test_a_tensor_of_ours_in_another_shape_is_one_sentence(tmp_path):
    folder = write_folder(tmp_path, {name: x for name, x in random_state().items() if not name.startswith("spare")})
    save_file({"network.spare.weight": torch.ones(3, 3)}, folder / "polyrhythm.safetensors")
    with pytest.raises(ConfigError, match=r"network.spare.weight is \[3, 3\] in polyrhythm.safetensors, \[2, 8\] in"):
        load_network(TOY, Checkpoint.open(folder), device="cpu")


def test_side_files_are_saved_in_their_own_format(tmp_path):
    state = random_state()
    side = {f"module.{name}": state.pop(f"spare.{name}").bfloat16() for name in ("weight", "bias")}
    folder = write_folder(tmp_path / "base", state)
    torch.save(side, folder / "action_head--10_checkpoint.pt")
    opened = Checkpoint.open(folder)
    policy = nn.ModuleDict({"network": nn.ModuleDict({"action_head": nn.Linear(8, 2)})})
    save_folder(opened, TOY, policy.state_dict(), tmp_path / "out")
    after = torch.load(tmp_path / "out" / "action_head--10_checkpoint.pt", weights_only=True)
    assert set(after) == set(side)
    assert torch.equal(after["module.weight"], policy["network"]["action_head"].weight.bfloat16())


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path):
    folder = write_folder(tmp_path / "base", random_state())
    policy = _policy(folder)
    with pytest.raises(ConfigError, match=r"out = .* it exists; name a new folder"):
        save_folder(Checkpoint.open(folder), TOY, policy.state_dict(), folder)
    opened = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        save_folder(opened, TOY, policy.state_dict(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    policy.network.own = nn.Parameter(torch.ones(2, 9))
    with pytest.raises(ConfigError, match=r"own is \[2, 9\] in the policy and \[2, 8\] in"):
        save_folder(opened, TOY, policy.state_dict(), tmp_path / "out")


def _with_adapters(state, rank=2):
    generator = torch.Generator().manual_seed(3)
    names = [name.removesuffix(".weight") for name in state if name.endswith("q_proj.weight")]
    parts = {"lora_A": (rank, 8), "lora_B": (8, rank)}
    return {
        f"network.{name}.{part}.weight": torch.randn(shape, generator=generator)
        for name in names
        for part, shape in parts.items()
    }


def merge(adapters, base, out):
    merge_of(adapters, base, TOY, out)


def test_adapters_are_loaded_by_peft_and_merged_alike(tmp_path):
    peft = pytest.importorskip("peft")
    state = random_state()
    folder = write_folder(tmp_path / "base", state, shards=2, prefix="model.")
    trained = _with_adapters(state) | {"critic.weight": torch.ones(1, 2), "network.own": state["own"]}
    save_adapters(trained, tmp_path / "adapters", alpha=3.0, base=Checkpoint.open(folder), prefix="model.")
    network = load_network(TOY, Checkpoint.open(folder), device="cpu")
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    plain = network(x)
    released = nn.ModuleDict({"model": network})  # its tensors have the folder's names
    wrapped = peft.PeftModel.from_pretrained(released, str(tmp_path / "adapters"))
    adapted = network(x)
    assert not torch.allclose(plain, adapted, atol=1e-2)

    merge(Adapters.open(tmp_path / "adapters"), Checkpoint.open(folder), tmp_path / "merged")
    opened = Checkpoint.open(tmp_path / "merged")
    merged = load_network(TOY, opened, device="cpu")
    torch.testing.assert_close(merged(x), adapted, atol=1e-5, rtol=0)
    assert opened.prefix == "model."
    assert len(opened.files) == 2
    assert [name for name, _ in opened.read_ours()] == ["critic.weight"]

    wrapped.save_pretrained(tmp_path / "of-peft")  # peft's own file merges too
    (tmp_path / "of-peft" / "README.md").unlink(missing_ok=True)
    merge(Adapters.open(tmp_path / "of-peft"), Checkpoint.open(folder), tmp_path / "again")
    assert (
        _files(tmp_path / "again")["model-00001-of-00002.safetensors"]
        == (_files(tmp_path / "merged")["model-00001-of-00002.safetensors"])
    )


def test_the_names_of_a_module_wrapped_by_peft_are_understood(tmp_path):
    state = random_state()
    trained = {
        name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."): tensor
        for name, tensor in _with_adapters(state).items()
    }
    base = {"network.blocks.0.q_proj.base_layer.weight": state["blocks.0.q_proj.weight"]}
    opened = Checkpoint.open(write_folder(tmp_path / "base", state))
    save_adapters(trained | base, tmp_path / "a", alpha=1.0, base=opened)
    assert Adapters.open(tmp_path / "a").modules == ("blocks.0.q_proj", "blocks.1.q_proj")


def test_merging_uses_scale_patterns_and_whole_tensors(tmp_path):
    state = random_state()
    folder = write_folder(tmp_path / "base", state, prefix="model.")
    save_adapters(_with_adapters(state), tmp_path / "a", alpha=4.0, base=Checkpoint.open(folder))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    config |= {"alpha_pattern": {"blocks.1.q_proj": 0.0}, "use_rslora": True}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    tensors["base_model.model.model.state_proj.bias"] = torch.full((8,), 9.0)  # named as stored, with the prefix
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    merge(Adapters.open(tmp_path / "a"), Checkpoint.open(folder), tmp_path / "out")
    after = dict(Checkpoint.open(tmp_path / "out").read())
    a, b = (tensors[f"base_model.model.blocks.0.q_proj.lora_{x}.weight"] for x in "AB")
    expected = state["blocks.0.q_proj.weight"] + 4.0 / 2**0.5 * (b @ a)
    torch.testing.assert_close(after["blocks.0.q_proj.weight"], expected)
    assert torch.equal(after["blocks.1.q_proj.weight"], state["blocks.1.q_proj.weight"])
    assert (after["state_proj.bias"] == 9.0).all()


def test_scales_are_those_of_peft_whatever_the_patterns(tmp_path):
    """Regular expressions of names, of which peft takes the first that fits."""
    state = random_state()
    folder = write_folder(tmp_path / "base", state)
    save_adapters(_with_adapters(state), tmp_path / "a", alpha=4.0, base=Checkpoint.open(folder))
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"alpha_pattern": {r"blocks\.[1-9]\.q_proj": 6.0, "q_proj": 2.0}}))
    merge(Adapters.open(tmp_path / "a"), Checkpoint.open(folder), tmp_path / "good")
    after = dict(Checkpoint.open(tmp_path / "good").read())
    trained = _with_adapters(state)
    for block, scale in ((0, 2.0 / 2), (1, 6.0 / 2)):
        a, b = (trained[f"network.blocks.{block}.q_proj.lora_{x}.weight"] for x in "AB")
        expected = state[f"blocks.{block}.q_proj.weight"] + scale * (b @ a)
        torch.testing.assert_close(after[f"blocks.{block}.q_proj.weight"], expected)
    for wrong in ({"alpha_pattern": {"blocks[": 1.0}}, {"lora_alpha": "much"}, {"alpha_pattern": ["q_proj"]}, {"r": 3}):
        file.write_text(json.dumps(config | wrong))
        with pytest.raises(ConfigError, match=r"a: peft cannot merge these adapters into this base \(.*\); ") as told:
            merge(Adapters.open(tmp_path / "a"), Checkpoint.open(folder), tmp_path / "out")
        assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()


def test_merging_keeps_the_networks_tensors_that_only_ours_has(tmp_path):
    state = random_state()
    folder = write_folder(tmp_path / "base", {name: x for name, x in state.items() if not name.startswith("spare")})
    ours = {"network.spare.weight": torch.ones(2, 8), "critic.weight": torch.zeros(1, 2)}
    save_file(ours, folder / "polyrhythm.safetensors")
    trained = _with_adapters(state) | {"critic.weight": torch.ones(1, 2)}
    save_adapters(trained, tmp_path / "a", alpha=4.0, base=Checkpoint.open(folder))
    merge(Adapters.open(tmp_path / "a"), Checkpoint.open(folder), tmp_path / "out")
    after = load_file(tmp_path / "out" / "polyrhythm.safetensors")
    assert torch.equal(after["network.spare.weight"], torch.ones(2, 8))
    assert torch.equal(after["critic.weight"], torch.ones(1, 2))


def test_a_whole_tensor_of_another_shape_is_not_merged(tmp_path):
    folder = write_folder(tmp_path / "base", random_state())
    trained = _with_adapters(random_state()) | {"network.state_proj.bias": torch.ones(3, 3)}
    save_adapters(trained, tmp_path / "a", alpha=4.0, base=Checkpoint.open(folder), also=["state_proj.*"])
    with pytest.raises(ConfigError, match=r"mismatch for .*state_proj.*\[3, 3\].*\[8\].*; name the base .*base\)"):
        merge(Adapters.open(tmp_path / "a"), Checkpoint.open(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_of_another_base_are_one_sentence(tmp_path):
    state = random_state()
    folder = write_folder(tmp_path / "base", state)
    wide = write_folder(tmp_path / "wide", random_state(ToySize(width=16)))
    save_adapters(_with_adapters(state), tmp_path / "a", alpha=4.0, base=Checkpoint.open(folder))
    with pytest.raises(ConfigError, match=r"mismatch for .*q_proj.*\[2, 8\].*\[2, 16\].*; name the base .*base\)"):
        merge(Adapters.open(tmp_path / "a"), Checkpoint.open(wide), tmp_path / "out")
    few = write_folder(tmp_path / "few", random_state(ToySize(layers=1)), config={"layers": 1})
    with pytest.raises(ConfigError, match=r"blocks.1.q_proj.lora_A.* in one of both alone\); name the base"):
        merge(Adapters.open(tmp_path / "a"), Checkpoint.open(few), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"it holds no adapter_config\.json"):
        Adapters.open(folder)
    with pytest.raises(ConfigError, match="the policy has no adapters"):
        save_adapters(ToyNetwork(ToySize()).state_dict(), tmp_path / "b", alpha=1.0, base=Checkpoint.open(folder))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text()) | {"alora_invocation_tokens": [1]}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"alora_invocation_tokens = .* are not merged here"):
        Adapters.open(tmp_path / "a")
