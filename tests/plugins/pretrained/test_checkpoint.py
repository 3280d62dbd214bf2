"""Released folders: what is opened, what is refused in one sentence, and how a network is filled from them."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.long import long
from tests.plugins.pretrained.released import TOY, ToyNetwork, ToySize, held_in, random_state, write_folder

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.building import load_network, load_ours, random_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import fit, released_size
from polyrhythm.plugins.vla.released import architecture
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.specs import WeightSpec
from polyrhythm.specs.weights import weight_specs

GOLDEN = Path(__file__).parents[1] / "vla" / "golden"


@pytest.mark.parametrize(("prefix", "shards"), [("", 1), ("model.", 1), ("", 3), ("model.", 2)])
def test_a_folder_has_its_tensors_under_the_networks_names(tmp_path, prefix, shards):
    state = random_state(dtype=torch.bfloat16)
    opened = Checkpoint.open(write_folder(tmp_path / "x", state, prefix=prefix, shards=shards))
    assert opened.prefix == prefix
    assert len(opened.files) == shards
    assert dict(opened.tensors) == weight_specs(state)
    read = dict(opened.read())
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    assert len(read) == len(state)
    assert [name for name, _ in opened.read(["own"])] == ["own"]


def test_a_prefix_that_not_all_names_have_belongs_to_the_names(tmp_path):
    state = {"model.a": torch.ones(2), "b": torch.ones(2)}
    opened = Checkpoint.open(write_folder(tmp_path, state))
    assert opened.prefix == ""
    assert set(opened.tensors) == {"model.a", "b"}
    state = {"model.a": torch.ones(2), "normalize_inputs.buffer_state.mean": torch.ones(2)}
    opened = Checkpoint.open(write_folder(tmp_path, state))
    assert opened.prefix == "model."
    assert set(opened.tensors) == {"a"}
    assert set(opened.extra) == {"normalize_inputs.buffer_state.mean"}


def test_opening_needs_no_torch(tmp_path):
    write_folder(tmp_path, random_state())
    program = (
        "import sys; from polyrhythm.plugins.pretrained.checkpoint import Checkpoint; "
        f"assert Checkpoint.open({str(tmp_path)!r}).architecture == 'pi0'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.dense.weight"], "pi05"),
        (["state_proj.weight", "time_mlp_in.bias"], "pi05"),
        (["state_proj.weight", "action_time_mlp_in.weight"], "pi0"),
        (["vision_backbone.featurizer.pos_embed"], "openvla_oft"),
        (["action_head.vl_self_attention.transformer_blocks.0.norm1.bias"], "groot_n1d5"),
        (["backbone.eagle_model.mlp1.0.weight", "action_head.vlln.bias"], "groot_n1d5"),
        (["transformer.h.0.weight"], ""),
    ],
)
def test_the_architecture_is_told_by_the_names(tmp_path, names, kind):
    opened = Checkpoint.open(write_folder(tmp_path, {name: torch.ones(1) for name in names}, prefix="model."))
    assert opened.architecture == kind
    if kind:
        opened.require(kind)
    with pytest.raises(ConfigError, match="policy.type = 'other', but .* is a" if kind else "no architecture known"):
        opened.require("other")


def test_side_files_are_tensors_of_their_modules(tmp_path):
    write_folder(tmp_path, {"vision_backbone.featurizer.cls_token": torch.ones(1)})
    head = {"module.model.fc1.weight": torch.arange(6.0).view(2, 3)}
    torch.save({name: tensor + 1 for name, tensor in head.items()}, tmp_path / "action_head--5000_checkpoint.pt")
    torch.save(head, tmp_path / "action_head--150000_checkpoint.pt")
    save_file({"fc1.bias": torch.ones(4)}, tmp_path / "proprio_projector.safetensors")
    opened = Checkpoint.open(tmp_path)
    assert opened.side == {"action_head.model.fc1.weight", "proprio_projector.fc1.bias"}
    assert opened.tensors["action_head.model.fc1.weight"] == WeightSpec((2, 3), "float32")
    assert torch.equal(dict(opened.read())["action_head.model.fc1.weight"], head["module.model.fc1.weight"])


def test_code_in_a_side_file_is_refused(tmp_path):
    write_folder(tmp_path, random_state())
    torch.save({"x": Path("run")}, tmp_path / "action_head--1_checkpoint.pt")
    with pytest.raises(ConfigError, match="cannot be read as tensors alone"):
        Checkpoint.open(tmp_path)


def test_statistics_and_tokenizer_are_found(tmp_path):
    write_folder(tmp_path, random_state())
    files = ["assets/physical-intelligence/libero/norm_stats.json", "dataset_statistics.json"]
    files += ["experiment_cfg/metadata.json", "policy_preprocessor_step_3_normalizer_processor.safetensors"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert Checkpoint.open(tmp_path).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    opened = Checkpoint.open(tmp_path)
    assert opened.statistics == tuple(tmp_path / name for name in files)
    assert opened.tokenizer == tmp_path


def _without(name):
    return lambda folder: (folder / name).unlink()


def _cut(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _index_names_more(folder):
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    content["weight_map"]["ghost.weight"] = "model-00002-of-00002.safetensors"
    file.write_text(json.dumps(content))


def _only(name):
    def change(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text("{}")

    return change


def _garbage(text):
    return lambda folder: (folder / "model-00002-of-00002.safetensors").write_text(text)


def _index_without_files(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"own": 2}}))


def _broken_config(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "there is no such folder"),
        (_without("model-00002-of-00002.safetensors"), "1 of the 2 files that .* missing .model-00002"),
        (_without("model.safetensors.index.json"), "2 shards but no model.safetensors.index.json"),
        (_cut, "the file was cut off"),
        (_index_names_more, "lacks 1 tensors that .* .ghost.weight"),
        (_garbage("version https://git-lfs.github.com/spec/v1"), "pointer of Git LFS"),
        (_garbage("<html>no</html> and so on"), "too few for its header, or no safetensors"),
        (_garbage("\x10\0\0\0\0\0\0\0 no JSON is here  "), "header that cannot be read"),
        (_only("pytorch_model.bin"), "holds pytorch_model.bin but no safetensors.* convert it: python -c"),
        (_only("adapter_config.json"), "holds adapters .* polyrhythm policies merge"),
        (_only("README.md"), "holds no safetensors; a folder with"),
        (_broken_config, "config.json is not JSON"),
        (_index_without_files, "has no weight_map from tensors to files"),
    ],
)
def test_a_folder_that_is_not_whole_is_one_sentence(tmp_path, change, said):
    folder = write_folder(tmp_path / "x", random_state(), shards=2)
    change(folder)
    with pytest.raises(ConfigError, match=said) as refused:
        Checkpoint.open(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_and_a_cache_are_told_where_the_folder_is(tmp_path):
    folder = write_folder(tmp_path / "models--a--pi0" / "snapshots" / "abc", random_state())
    with pytest.raises(ConfigError, match=f"a file; name its folder, {folder}"):
        Checkpoint.open(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"name the folder in it: {folder}"):
        Checkpoint.open(tmp_path / "models--a--pi0")


def test_a_network_is_filled_with_ties_constants_and_dtypes(tmp_path):
    state = random_state()
    opened = Checkpoint.open(write_folder(tmp_path, state, shards=2, prefix="model."))
    kept = torch.random.get_rng_state()
    network = load_network(TOY, opened, device="cpu", prepare=held_in(torch.bfloat16))
    assert torch.equal(kept, torch.random.get_rng_state())
    built = ToyNetwork(ToySize())
    for name, tensor in network.state_dict().items():
        wanted = torch.float32 if "norm" in name or name == "steps" else torch.bfloat16
        assert tensor.dtype == wanted, name
        assert torch.equal(tensor, state[name].to(wanted)), name
    assert network.words.weight is network.lm_head.weight
    assert torch.equal(network.frequencies, built.frequencies)
    assert torch.equal(network.periods, built.periods)
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in network.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_is_filled_on_a_gpu(tmp_path):
    state = random_state()
    opened = Checkpoint.open(write_folder(tmp_path, state, shards=2))
    network = load_network(TOY, opened, device="cuda", prepare=held_in(torch.bfloat16))
    assert {tensor.device.type for tensor in (*network.parameters(), *network.buffers())} == {"cuda"}
    assert torch.equal(network.own.cpu(), state["own"].bfloat16())
    drawn, on_cpu = (random_network(TOY, ToySize(), seed=1, device=device) for device in ("cuda", "cpu"))
    assert torch.equal(drawn.own.cpu(), on_cpu.own)


def test_filled_tensors_do_not_share_the_file(tmp_path):
    opened = Checkpoint.open(write_folder(tmp_path, random_state()))
    network = load_network(TOY, opened, device="cpu")
    before = network.own.detach().clone()
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert torch.equal(network.own, before)


def test_another_name_of_a_tied_tensor_is_taken(tmp_path):
    state = random_state()
    state["words.weight"] = state.pop("lm_head.weight")
    network = load_network(TOY, Checkpoint.open(write_folder(tmp_path, state)), device="cpu")
    assert torch.equal(network.lm_head.weight, state["words.weight"])


def test_what_is_optional_comes_from_the_seed(tmp_path):
    state = {name: tensor for name, tensor in random_state().items() if not name.startswith("spare")}
    opened = Checkpoint.open(write_folder(tmp_path, state | {"vision_head.x": torch.ones(1)}))
    first, again, other = (load_network(TOY, opened, device="cpu", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["spare.weight"], other["spare.weight"])
    assert all(torch.equal(first[name], other[name]) for name in state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("own"), r"1 tensor missing \(own\)"),
        (lambda state: state.update(ghost=torch.ones(1)), r"1 tensor unexpected \(ghost\)"),
        (
            lambda state: state.update({"state_proj.weight": torch.ones(8, 5)}),
            r"1 tensor of another shape \(state_proj.weight is \[8, 5\], \[8, 3\] expected\)",
        ),
    ],
)
def test_a_folder_that_does_not_fit_names_the_first_tensors(tmp_path, change, said):
    state = random_state()
    change(state)
    with pytest.raises(ConfigError, match=said):
        load_network(TOY, Checkpoint.open(write_folder(tmp_path, state)), device="cpu")


def test_a_size_that_the_folder_does_not_tell_is_one_sentence(tmp_path):
    opened = Checkpoint.open(write_folder(tmp_path, random_state(), config={}))
    with pytest.raises(ConfigError, match=r"layers is neither in config\.json nor among the tensors"):
        released_size(TOY, opened)


@pytest.mark.parametrize(
    ("kind", "folder", "section", "changes", "said"),
    [
        ("pi0", "pi0", "", {"chunk_size": "50"}, "config.json gives horizon = '50', not a number"),
        ("pi0", "pi0", "vision_config", {"num_attention_heads": 7}, "width = 40 is not a multiple of its heads = 7"),
        ("pi0", "pi0", "", {"vision_config": [1]}, "its config.json does not describe a network of pi0"),
        ("openvla_oft", "openvla_oft", "", {"image_sizes": [42]}, "does not describe a network of openvla_oft"),
        ("openvla_oft", "openvla_oft", "text_config", {"rope_theta": "x"}, "theta = 'x', not a number"),
        ("groot_n1d5", "gr00t_n1_5", "action_head_cfg", {"action_horizon": "6"}, "does not describe a network of"),
    ],
)
def test_a_config_of_other_kinds_of_values_is_one_sentence(tmp_path, kind, folder, section, changes, said):
    shutil.copytree(GOLDEN / folder, tmp_path / "x")
    file = tmp_path / "x" / "config.json"
    config = json.loads(file.read_text())
    (config[section] if section else config).update(changes)
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said) as caught:
        released_size(architecture(kind), Checkpoint.open(tmp_path / "x"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "said"), [("pi0", "is not a multiple"), ("openvla_oft", "of another shape")])
def test_a_missing_config_is_told_where_the_sizes_do_not_fit(tmp_path, kind, said):
    shutil.copytree(GOLDEN / kind, tmp_path / "x")
    (tmp_path / "x" / "config.json").unlink()
    with pytest.raises(ConfigError, match=said + r".* \(it has no config.json, so the sizes of the release were"):
        load_network(architecture(kind), Checkpoint.open(tmp_path / "x"), device="cpu")


def test_a_folder_of_a_full_network_is_compared_without_its_tensors(tmp_path):
    opened = Checkpoint.open(write_folder(tmp_path, random_state()))
    with weights_on_meta():
        network = TOY.network(released_size(TOY, opened))
    assert network.own.is_meta
    assert network.large.is_meta
    assert network.lm_head.weight.is_meta
    assert not network.frequencies.is_meta
    assert fit(opened, weight_specs(network.state_dict()), TOY).is_whole


def test_without_a_checkpoint_the_seed_decides():
    first, again, other = (
        random_network(TOY, ToySize(), seed=seed, device="cpu", prepare=held_in(torch.bfloat16)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.own, again.own)
    assert not torch.equal(first.own, other.own)
    assert first.own.dtype == torch.bfloat16
    assert first.frequencies.dtype == torch.float32
    assert first.words.weight is first.lm_head.weight


def test_a_forgotten_constant_is_found(tmp_path):
    class Forgets(ToyNetwork):
        def __init__(self, size):
            super().__init__(size)
            self.register_buffer("lost", torch.empty(2), persistent=False)

    of = TOY.__class__(name="pi0", size=TOY.size, network=Forgets)
    with pytest.raises(AssertionError, match="lost is in no checkpoint and has no value"):
        load_network(of, Checkpoint.open(write_folder(tmp_path, random_state())), device="cpu")


def test_ours_are_taken_from_their_own_file(tmp_path):
    write_folder(tmp_path, random_state())
    policy = torch.nn.ModuleDict({"critic": torch.nn.Linear(2, 1)})
    save_file({"critic.weight": torch.tensor([[3.0, 4.0]])}, tmp_path / "polyrhythm.safetensors")
    load_ours(policy, Checkpoint.open(tmp_path))
    assert policy["critic"].weight.tolist() == [[3.0, 4.0]]
    save_file({"critic.weight": torch.ones(1, 5)}, tmp_path / "polyrhythm.safetensors")
    with pytest.raises(ConfigError, match=r"critic.weight is \[1, 5\] in polyrhythm.safetensors, \[1, 2\]"):
        load_ours(policy, Checkpoint.open(tmp_path))


@long(4, "two loads in a process of their own")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_filling_makes_no_second_copy_of_the_model(tmp_path):
    large = ToySize(width=1024, words=1024, layers=12)  # 54 MB
    write_folder(tmp_path / "large", random_state(large), config={"layers": 12})
    write_folder(tmp_path / "small", random_state())
    program = f"""
import re
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from polyrhythm.plugins.pretrained.building import load_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from tests.plugins.pretrained.released import TOY

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024

class Peak(TorchDispatchMode):
    seen = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {{}}))
        self.seen = max(self.seen, anonymous())
        return found

def load(folder):
    with Peak() as peak:
        network = load_network(TOY, Checkpoint.open(folder), device="cpu")
    return peak.seen, sum(x.nbytes for x in network.state_dict().values())

load({str(tmp_path / "small")!r})  # imports
before = anonymous()
peak, size = load({str(tmp_path / "large")!r})
print(peak - before, size)
"""
    here = Path(__file__).parents[3]
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=here).stdout
    taken, needed = map(int, said.split())
    assert needed > 50e6
    assert needed * 0.9 < taken < needed * 1.2


@pytest.mark.parametrize(
    ("kind", "folder", "extra"),
    [
        ("pi0", "pi0", ("value_head.mlp.0.weight", "noise_head.mlp.0.bias")),
        ("openvla_oft", "openvla_oft", ("value_head.mlp.0.weight",)),
        ("groot_n1d5", "gr00t_n1_5", ("action_head.value_head.mlp.0.weight",)),
    ],
)
def test_heads_of_reinforcement_learning_elsewhere_are_ignored(tmp_path, kind, folder, extra):
    state = dict(Checkpoint.open(GOLDEN / folder).read())
    config = json.loads((GOLDEN / folder / "config.json").read_text())
    added = {name: torch.ones(1) for name in extra}
    opened = Checkpoint.open(write_folder(tmp_path, state | added, config=config))
    of = architecture(kind)
    with weights_on_meta():
        network = of.network(released_size(of, opened))
    assert fit(opened, weight_specs(network.state_dict()), of).is_whole
    strict = dataclasses.replace(of, unused=())
    assert set(fit(opened, weight_specs(network.state_dict()), strict).unexpected) == set(extra)


def test_the_command_for_a_file_of_torch_save_converts_it(tmp_path):
    state = random_state()
    torch.save(state, tmp_path / "it's.pt")
    (tmp_path / "config.json").write_text('{"layers": 2}')
    with pytest.raises(ConfigError, match=r"files of torch\.save can run code; convert it: ") as told:
        Checkpoint.open(tmp_path)
    exec(shlex.split(str(told.value).split("convert it: ")[1])[2])
    assert all(torch.equal(tensor, state[name]) for name, tensor in Checkpoint.open(tmp_path).read())
    assert not (tmp_path / "NEW").exists()
