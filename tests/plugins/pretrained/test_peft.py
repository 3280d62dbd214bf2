"""Adapters as peft has them: merged here to what peft computes with them, and exported so that peft reads the same."""

from __future__ import annotations

import json
import shlex
import typing
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.language.test_causal_lm import text_settings
from tests.plugins.pretrained.small_tokenizer import VOCABULARY, write_tokenizer
from torch import Tensor, nn

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.causal_lm import folders
from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm.plugins.pretrained.adapters import MERGED_BY, NOT_NEEDED, Adapters, merge
from polyrhythm.plugins.pretrained.building import load_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.vla.released import architecture

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[1] / "vla" / "golden"
TOKENS = torch.arange(1, 15)[None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # that a model with tied tensors may be merged wrongly
]

#: Name -> settings of peft's LoraConfig. Each key of MERGED_BY is in one of them.
MADE: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"^model.layers.0.*": 3}},
    "rslora": {"use_rslora": True, "r": 3, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "bias of all": {"bias": "all"},
    "bias of the adapters": {"lora_bias": True, "bias": "lora_only"},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "all but": {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
    "expression": {"target_modules": r".*\.(q|up)_proj"},
    "parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "whole norm": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
    "velora": {"velora_config": {}},
    "kasa": {"kasa_config": {}},
    "monteclora": {"monteclora_config": {}},
    "blocks": {"use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"]}},
    "qalora, which is for other bases": {"use_qalora": True, "qalora_group_size": 4},
    **{f"begins {kind}": {"init_lora_weights": kind} for kind in ("gaussian", "orthogonal", "mica", "eva", False)},
    "begins pissa": {"init_lora_weights": "pissa", "target_modules": "all-linear"},
    "begins pissa, scaled": {"init_lora_weights": "pissa", "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "begins olora": {"init_lora_weights": "OLoRA", "use_dora": True},
}
#: The same for what a model may tie.
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "adapted embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "adapted head": {"target_modules": ["lm_head", "q_proj"]},
    "adapted both": {"target_modules": ["embed_tokens", "lm_head"]},
    "adapted, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "whole, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}},
}
#: Ways of saving: options of peft's save_pretrained.
SAVED: dict[str, dict[str, Any]] = {"bin": {"safe_serialization": False}, "embeddings": {"save_embedding_layers": True}}


def write_base(folder: Path, *, tied: bool = False, both: bool = False) -> Path:
    """A Llama with biases. tied: its head is its embedding; both: and the folder has it under both names."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if both:
        from safetensors.torch import load_file, save_file

        state = load_file(folder / "model.safetensors")
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    kinds: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tied": True}, "both": {"tied": True, "both": True}}
    return {name: write_base(root / name, **kind) for name, kind in kinds.items()}


def model_of(folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return found


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model.eval()(TOKENS).logits
    return found


@torch.no_grad()
def trained(model: nn.Module) -> nn.Module:
    """With other numbers in all that is trained."""
    for p in model.parameters():
        if p.requires_grad:
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def adapted(base: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return trained(peft.get_peft_model(base, peft.LoraConfig(**settings)))


def check_merged(base: Path, model: nn.Module, folder: Path, **saved: Any) -> Path:
    """Save by peft, merge here, and compare with the model that peft has; the merged folder."""
    model.save_pretrained(folder / "adapters", **saved)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    folders.merge(Adapters.open(folder / "adapters"), Checkpoint.open(base), folder / "out")
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    merged = logits(model_of(folder / "out"))
    torch.testing.assert_close(merged, logits(model), atol=1e-5, rtol=0.0)
    assert (merged - logits(model_of(base))).abs().max() > 1e-3, "they add something"
    return folder / "out"


@pytest.mark.parametrize("options", MADE.values(), ids=MADE)
def test_adapters_of_every_key_are_merged_as_peft_runs_them(
    bases: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    check_merged(bases["untied"], adapted(model_of(bases["untied"]), options), tmp_path)


@pytest.mark.parametrize("base", ["untied", "tied", "both"])
@pytest.mark.parametrize("options", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_adapters_of_embeddings_are_merged_tied_or_not(
    bases: dict[str, Path], tmp_path: Path, options: dict[str, Any], base: str
) -> None:
    out = check_merged(bases[base], adapted(model_of(bases[base]), options), tmp_path)
    files = {path.name for path in out.iterdir()}
    assert files == {path.name for path in bases[base].iterdir()}, "the tokenizer and all other files are there"
    CausalLmSettings(checkpoint=str(out)).form(text_settings(out).spec())


@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("base", ["untied", "tied"])
def test_every_way_of_saving_is_read(bases: dict[str, Path], tmp_path: Path, saved: dict[str, Any], base: str) -> None:
    check_merged(bases[base], adapted(model_of(bases[base]), {}), tmp_path, **saved)


@pytest.mark.parametrize("kind", ["pissa", "olora", "pissa_niter_4"])
def test_adapters_that_peft_made_plain_are_merged(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    model = peft.get_peft_model(model_of(bases["untied"]), peft.LoraConfig(r=4, init_lora_weights=kind))
    initial = model.peft_config["default"]
    initial.init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    initial.init_lora_weights = kind
    how = {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
    check_merged(bases["untied"], trained(model), tmp_path, **how)


def test_transposed_matrices_are_merged(tmp_path: Path) -> None:
    """GPT-2 has them, and names without its prefix."""
    config = transformers.GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    options = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "init_lora_weights": "pissa"}
    check_merged(tmp_path / "base", adapted(model_of(tmp_path / "base"), options), tmp_path)


@pytest.mark.parametrize("init", [True, "pissa"])
def test_linear_and_convolved_layers_of_a_vla_are_merged(tmp_path: Path, init: object) -> None:
    base, of = Checkpoint.open(GOLDEN / "pi0"), architecture("pi0")
    network = load_network(of, base, device="cpu")
    convolved = [name for name, part in network.named_modules() if isinstance(part, nn.Conv2d)]
    targets = ["q_proj", *(convolved if init is True else ())]
    model = adapted(network, {"target_modules": targets, "init_lora_weights": init})
    model.save_pretrained(tmp_path / "adapters")
    merge(Adapters.open(tmp_path / "adapters"), base, of, tmp_path / "out")
    merged = load_network(of, Checkpoint.open(tmp_path / "out"), device="cpu").state_dict()
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=0.0, msg=name)
    assert not convolved or "Conv2d" in {type(part).__name__ for part in network.modules()}


def test_heads_beside_the_adapted_model_are_left_as_they_are(tmp_path: Path) -> None:
    """Adapters of fc1 were made of the model alone; here its heads, of files of their own, have layers named so."""
    base, of = Checkpoint.open(GOLDEN / "openvla_oft"), architecture("openvla_oft")
    network = load_network(of, base, device="cpu")
    released = nn.Module()
    for name, part in network.named_children():
        if name not in {place.partition(".")[0] for place in base.side}:
            released.add_module(name, part)
    model = adapted(released, {"target_modules": ["fc1", "q_proj"]})
    model.save_pretrained(tmp_path / "adapters")
    merge(Adapters.open(tmp_path / "adapters"), base, of, tmp_path / "out")
    merged, before = (dict(Checkpoint.open(path).read()) for path in (tmp_path / "out", base.folder))
    expected = model.merge_and_unload().state_dict()
    assert any(not torch.equal(before[name], merged[name]) for name in expected if name.endswith("fc1.weight"))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected.get(name, before[name]), atol=1e-5, rtol=0.0, msg=name)


# ------------------------------------------------------------ what is refused

REFUSED = {
    "megatron_config": {"hidden_size": 16},
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2], [0, 1]],
    "arrow_config": {"top_k": 1},
    "a_key_of_a_newer_peft": True,
}
CHANGED = ("pissa_niter_4", "corda", "loftq", "lora_ga")


def test_every_key_of_peft_is_merged_by_or_not_needed_or_refused() -> None:
    """A newer peft with a key that is in none of the three fails here."""
    known = {field.name for field in fields(peft.LoraConfig) if not field.name.startswith("_")}
    assert known - MERGED_BY - NOT_NEEDED == REFUSED.keys() - {"a_key_of_a_newer_peft"}
    tried = {key for table in (MADE, EMBEDDINGS) for options in table.values() for key in options}
    assert tried | {"fan_in_fan_out"} >= MERGED_BY


def test_every_way_to_begin_is_merged_or_refused() -> None:
    hints = typing.get_type_hints(peft.LoraConfig)["init_lora_weights"]
    kinds = {kind for part in typing.get_args(hints) for kind in typing.get_args(part)}
    tried = {str(options["init_lora_weights"]).lower() for options in MADE.values() if "init_lora_weights" in options}
    assert kinds - tried - set(CHANGED) <= {"pissa_niter_[number of iters]"}


@pytest.mark.parametrize("wrong", [*({key: value} for key, value in REFUSED.items()), {"peft_type": "IA3"}])
def test_adapters_that_no_merge_equals_are_refused(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    _rewritten(bases["untied"], tmp_path, wrong)
    for words in (["inspect"], ["merge", "--base", str(bases["untied"]), "--out", str(tmp_path / "out")]):
        assert main(["policies", words[0], str(tmp_path / "a"), *words[1:]]) == 2
        said = capsys.readouterr().err
        assert f"{next(iter(wrong))} = " in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", CHANGED)
def test_a_base_that_was_changed_unknowably_is_refused(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    _rewritten(bases["untied"], tmp_path, {"init_lora_weights": kind})
    with pytest.raises(ConfigError, match=rf"init_lora_weights = '{kind}' has changed the base .*; save them with"):
        Adapters.open(tmp_path / "a")


def _rewritten(base: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Plain adapters, of which adapter_config.json says more."""
    adapted(model_of(base), {}).save_pretrained(folder / "a")
    file = folder / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_biases_without_a_place_are_left_to_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"target_modules": ["up_proj"], "lora_bias": True}
    adapted(model_of(bases["untied"]), options).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"base layer has no bias\.\); leave them to peft"):
        folders.merge(Adapters.open(tmp_path / "a"), Checkpoint.open(bases["untied"]), tmp_path / "out")


def test_a_module_that_is_saved_in_part_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapted(model_of(bases["untied"]), {"modules_to_save": ["lm_head"]}).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "lm_head" not in name}, file)
    with pytest.raises(ConfigError, match=r"\(they lack '.*lm_head\.weight'\); name the base"):
        folders.merge(Adapters.open(tmp_path / "a"), Checkpoint.open(bases["untied"]), tmp_path / "out")


@pytest.mark.parametrize("named", ["../secret", "x; rm -rf y", "a\nb", "\x1b[31m", "org/name", ""])
def test_the_base_that_adapters_name_is_not_opened(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    _rewritten(bases["untied"], tmp_path, {"base_model_name_or_path": named})
    assert main(["policies", "merge", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the base is opened only where the command names it; add --base " in said
    assert said.removesuffix("\n").isprintable()
    assert main(["policies", "inspect", str(tmp_path / "a")]) == 0
    assert f"--base {shlex.quote(named)}" in capsys.readouterr().out or not named.isprintable() or not named


def test_numbers_that_are_not_finite_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(model_of(bases["untied"]), {})
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad)[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="has numbers that are not finite; name other adapters"):
        folders.merge(Adapters.open(tmp_path / "a"), Checkpoint.open(bases["untied"]), tmp_path / "out")


# ------------------------------------------------------------ ours, read by peft

LORA = {"rank": 3, "alpha": 6.0, "targets": ["*q_proj.weight"]}
EXPORTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole embedding": {"also": ["*embed_tokens.weight"]},
    "whole head": {"also": ["lm_head.weight"]},
    "adapted head": {"targets": ["lm_head.weight", "*q_proj.weight"]},
    "a weight without its bias": {"also": ["*layers.1.self_attn.o_proj.weight"]},
}


@pytest.mark.parametrize("base", ["untied", "tied", "both"])
@pytest.mark.parametrize("lora", EXPORTED.values(), ids=EXPORTED)
def test_exported_adapters_are_the_same_policy_to_peft(
    bases: dict[str, Path], tmp_path: Path, lora: dict[str, Any], base: str
) -> None:
    section = CausalLmSettings.model_validate(
        {"checkpoint": str(bases[base]), "train": "lora", "lora": {**LORA, **lora}}
    )
    policy = section.build(text_settings(bases[base]).spec(), seed=0, device="cpu", role="train").eval()
    trained(policy)
    opened = Checkpoint.open(bases[base])
    assert folders.save_trained(policy.published(), section, opened, tmp_path / "adapters") == "adapters"
    ours = logits(policy.network.model)
    theirs = peft.PeftModel.from_pretrained(model_of(bases[base]), tmp_path / "adapters")
    torch.testing.assert_close(logits(theirs), ours, atol=1e-5, rtol=0.0)
    folders.merge(Adapters.open(tmp_path / "adapters"), opened, tmp_path / "merged")
    torch.testing.assert_close(logits(model_of(tmp_path / "merged")), ours, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("base", "also"), [("tied", "*embed_tokens.weight"), ("both", "*embed_tokens.weight"), ("tied", "*embed*")]
)
def test_an_adapter_of_what_is_trained_whole_is_refused(bases: dict[str, Path], base: str, also: str) -> None:
    lora = {"also": [also], "targets": ["lm_head.weight"]}
    section = CausalLmSettings.model_validate({"checkpoint": str(bases[base]), "train": "lora", "lora": lora})
    with pytest.raises(ConfigError, match=r"lm_head\.weight is trained in full, but lm_head in the same module has an"):
        section.form(text_settings(bases[base]).spec())
