"""The policy `causal_lm`: contract, masks, memory of logits, folders."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.pretrained.small_tokenizer import VOCABULARY, write_tokenizer
from torch import Tensor

from polyrhythm.cli.main import main
from polyrhythm.conformance import Note
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.causal_lm.engine import Sampling, draw, entropy, process_logits
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork, cache_bytes, random_network
from polyrhythm.plugins.language.causal_lm.packing import Packing, SlotCache
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE, CausalLm, CausalLmSettings
from polyrhythm.plugins.language.text import TextSettings
from polyrhythm.plugins.language.text.chains import ChainsSettings
from polyrhythm.plugins.language.text.tokenizers import folder_tokenizer
from polyrhythm.plugins.trial.policy_contract import policy_checks, value_gradient_reach
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.training.checkpoint import save_state

ENV = ChainsSettings(max_new_tokens=20)
TINY = {"layers": 2, "width": 32, "heads": 2, "hidden": 64}


def observations(settings: TextSettings, rows: int) -> dict[str, Tensor]:
    batch = settings.build(rows)
    batch.reset(range(rows), [0] * rows, range(rows))
    out = {name: np.zeros((rows, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    batch.observe(range(rows), out)
    return {name: torch.from_numpy(array) for name, array in out.items()}


def built(**settings: float) -> CausalLm:
    section = CausalLmSettings.model_validate({**TINY, **settings})
    return section.build(ENV.spec(), seed=0, device="cpu", role="train").eval()


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6, "top_k": 9, "top_p": 0.8}, {"value_head": True}],
    ids=["plain", "cut", "value"],
)
def test_it_keeps_the_contract(settings: dict[str, float]) -> None:
    section = CausalLmSettings.model_validate({**TINY, **settings})
    checks = policy_checks(section, observations(ENV, 6), ENV.spec(), imitates=True)
    told = {name: check() for name, check in checks.items()}
    assert [name for name, answer in told.items() if isinstance(answer, Note)] == []


@pytest.mark.parametrize("detach", [True, False])
def test_the_value_loss_stays_out_of_the_network_if_detached(detach: bool) -> None:
    reached = value_gradient_reach(built(value_head=True, value_detach=detach), observations(ENV, 3))
    assert {name.partition(".")[0] for name in reached} == ({"critic"} if detach else {"critic", "network"})


def test_a_tokens_value_is_that_of_a_prompt_which_ends_before_it() -> None:
    policy, obs = built(value_head=True), observations(ENV, 3)
    message = torch.randint(1, 15, (3, 20), dtype=torch.int32)
    message[:, 7] = 0
    value = policy.evaluate(obs, {MESSAGE: message}).value
    assert torch.equal(policy.late_values(obs, {MESSAGE: message}), value)
    assert bool((value[:, :8] != 0).all())
    assert not bool(value[:, 8:].any()), "behind the end"
    for tokens in range(8):
        longer = torch.cat([obs["tokens"], torch.zeros_like(obs["tokens"])], 1)
        for row, length in enumerate(obs["length"].tolist()):
            longer[row, length : length + tokens] = message[row, :tokens]
        shown = {**obs, "tokens": longer, "length": obs["length"] + tokens}
        torch.testing.assert_close(policy.value(shown)[:, 0], value[:, tokens])


def test_what_is_behind_the_end_of_a_message_has_no_effect() -> None:
    policy, obs = built(), observations(ENV, 4)
    message = torch.randint(1, 15, (4, 20), dtype=torch.int32)
    message[:, 5] = 0
    other = message.clone()
    other[:, 6:] = torch.randint(1, 15, (4, 14), dtype=torch.int32)
    first, second = (policy.evaluate(obs, {MESSAGE: x}) for x in (message, other))
    assert torch.equal(first.logprob, second.logprob)
    assert (first.logprob[:, :6] != 0).all()
    assert not first.logprob[:, 6:].any()
    assert not first.entropy[:, 6:].any()
    losses = [policy.sft_loss(obs, x.long().unsqueeze(-1)) for x in (message, other)]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], -first.logprob.sum() / 24)


def test_the_loss_of_some_logits_at_a_time_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = observations(ENV, 20)
    message = torch.randint(0, 20, (20, 20))
    gradients = []
    for mib in (0.0005, 256.0):  # 6 tokens, all of them
        policy = built(logits_mib=mib)
        policy.sft_loss(obs, message.unsqueeze(-1)).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


#: Kinds of models that differ in attention, positions or biases; sizes besides SIZES.
KINDS = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "mistral": {"num_key_value_heads": 1, "sliding_window": 60},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "phi": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def network_of(kind: str) -> CausalNetwork:
    from transformers import CONFIG_MAPPING

    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    sizes = KINDS[kind] if kind == "gpt2" else {**SIZES, **KINDS[kind], "max_position_embeddings": 64}
    return random_network(CONFIG_MAPPING[kind](vocab_size=20, **tokens, **sizes), seed=1)


def padded_log_probs(policy: CausalLm, obs: dict[str, Tensor], message: Tensor) -> Tensor:
    """By transformers alone: all rows in one batch with padding behind, and torch's attention with its own mask."""
    model = policy.network.model
    model.set_attn_implementation("sdpa")
    rows, chunk = message.shape
    stop = torch.isin(message, torch.tensor(ENV.spec().action.stops)).int()
    counts = (stop.cumsum(1) - stop == 0).sum(1)
    sequences = torch.zeros(rows, 60, dtype=torch.int64)
    logprob = torch.zeros(rows, chunk)
    for row, length in enumerate(obs["length"].tolist()):
        sequences[row, :length] = obs["tokens"][row, :length]
        sequences[row, length : length + chunk] = message[row]
    log_p = model(sequences).logits.log_softmax(-1)
    for row, (length, count) in enumerate(zip(obs["length"].tolist(), counts.tolist(), strict=True)):
        at = log_p[row, length - 1 : length - 1 + count]
        logprob[row, :count] = at.gather(1, message[row, :count, None].long()).squeeze(1)
    return logprob


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_have_the_log_probs_and_gradients_of_padded_ones(kind: str) -> None:
    torch.manual_seed(0)
    obs, message = observations(ENV, 12), torch.randint(0, 20, (12, 20), dtype=torch.int32)
    message[:6] = 1  # some run to the limit
    found = []
    for logprobs in (lambda p: p.evaluate(obs, {MESSAGE: message}).logprob[..., 0], None):
        policy = CausalLm(CausalLmSettings(), ENV.spec(), network_of(kind)).eval()
        logprob = padded_log_probs(policy, obs, message) if logprobs is None else logprobs(policy)
        logprob.square().sum().backward()
        found.append((logprob.detach(), {name: p.grad for name, p in policy.named_parameters()}))
    (packed, packed_gradients), (padded, padded_gradients) = found
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    largest = max(float(x.abs().max()) for x in padded_gradients.values() if x is not None)
    for name, gradient in padded_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5 * largest, rtol=1e-5, msg=name)


def test_nothing_is_padded() -> None:
    policy, obs = built(), observations(ENV, 9)
    message = torch.randint(0, 20, (9, 20))
    inputs = {MESSAGE: message}
    seen: list[int] = []
    policy.network.model.base_model.layers[0].register_forward_hook(
        lambda _layer, _given, out: seen.append(out.shape[1])
    )
    policy.evaluate(obs, inputs)
    assert seen == [int(policy.row_tokens(obs, inputs).sum())]
    policy.evaluate_longest(obs, inputs)
    assert seen[1] == 9 * (ENV.max_prompt_tokens + 20 - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_takes_what_the_form_says(kind: str) -> None:
    network = network_of(kind)
    cache = SlotCache(3, 60)
    rows = torch.tensor([0, 0, 2, 2, 2])
    network.prefill(torch.ones(5, dtype=torch.int64), Packing([2, 3]), rows, cache)
    assert cache.nbytes == 3 * 60 * cache_bytes(network.model.config)


def test_the_longest_rows_are_evaluated_as_any_others() -> None:
    policy = built()
    obs = {"tokens": torch.randint(1, 15, (3, 36), dtype=torch.int32), "length": torch.full((3,), 36)}
    inputs = {MESSAGE: torch.randint(1, 15, (3, 20))}
    longest = policy.evaluate_longest(obs, inputs).logprob
    torch.testing.assert_close(longest, policy.evaluate(obs, inputs).logprob)


def test_sampling_is_cut_to_the_likeliest_tokens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]]))
    by_k = process_logits(logits, Sampling(5, top_k=2)).exp()
    torch.testing.assert_close(by_k, torch.tensor([[0.625, 0.375, 0.0, 0.0, 0.0]]))
    by_p = process_logits(logits, Sampling(5, top_p=0.9)).exp()
    torch.testing.assert_close(by_p[0, :3], torch.tensor([0.5, 0.3, 0.15]) / 0.95)
    assert process_logits(logits, Sampling(5, top_p=0.01)).exp()[0, 0] == 1.0, "the likeliest is always left"
    kept = process_logits(logits, Sampling(5, top_k=2), keep=torch.tensor([3]))
    torch.testing.assert_close(kept.exp()[0], torch.tensor([0.5, 0.3, 0.0, 0.05, 0.0]) / 0.85)
    assert process_logits(logits, Sampling(3)).shape == (1, 3), "logits beyond the tokenizer's ids do not exist"


def test_a_draw_follows_the_distribution_and_never_what_was_cut() -> None:
    log_p = process_logits(torch.log(torch.tensor([0.2, 0.5, 0.3, 1e-9])), Sampling(4, top_k=3)).expand(2000, -1)
    uniform = (torch.arange(2000) + 0.5) / 2000
    uniform[-1] = 1.0 - 2.0**-24
    tokens, logprob = draw(log_p, uniform, torch.zeros(2000, dtype=torch.bool))
    assert tokens.bincount(minlength=4).tolist() == pytest.approx([400, 1000, 600, 0], abs=2)
    torch.testing.assert_close(logprob, log_p[0][tokens])
    assert (draw(log_p, uniform, torch.ones(2000, dtype=torch.bool))[0] == 1).all()
    torch.testing.assert_close(entropy(log_p[0]), torch.distributions.Categorical(probs=log_p[0].exp()).entropy())


# ------------------------------------------------------------ folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)  # as most released ones are
    return write_tokenizer(path)


def text_settings(folder: Path, **settings: int) -> TextSettings:
    class Story(TextSettings):
        type: str = "story"

        def conversation(self) -> Prompted:
            return Prompted()

    return Story(tokenizer=str(folder), **{"max_new_tokens": 12, "max_prompt_tokens": 40, **settings})


class Prompted:
    def begin(self, task: int, seed: int) -> str:
        return f"Task: push the red block, State: {seed};\nAction: "

    def reply(self, message: str) -> object:
        raise NotImplementedError


def test_a_folders_model_keeps_the_contract_and_has_its_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    env = text_settings(folder)
    section = CausalLmSettings(checkpoint=str(folder), temperature=0.8)
    checks = policy_checks(section, observations(env, 6), env.spec(), imitates=True)
    for name in ("attributes", "act", "form", "evaluate agrees with act", "noise by key alone", "gradient"):
        checks[name]()
    policy = section.build(env.spec(), seed=0, device="cpu", role="act")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    ours = policy.network.logits(policy.network.packed(tokens.flatten(), Packing([9, 9])))
    torch.testing.assert_close(ours.view(2, 9, -1), theirs(tokens).logits)


def test_a_context_beyond_the_models_positions_is_refused(folder: Path) -> None:
    env = text_settings(folder, max_prompt_tokens=80)
    told = r"its max_position_embeddings is 64, the environment has up to 92 tokens \(env.max_prompt_tokens"
    with pytest.raises(ConfigError, match=told):
        CausalLmSettings(checkpoint=str(folder)).form(env.spec())


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin"]])
def test_weights_of_torch_save_are_refused_with_a_conversion(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    base = Path(shutil.copytree(folder, tmp_path / "its base"))
    state = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    places = {tensor: names[number % len(names)] for number, tensor in enumerate(state)}
    for name in names:
        torch.save({tensor: state[tensor] for tensor, place in places.items() if place == name}, base / name)
    if len(names) > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"but no safetensors, and files of torch\.save can run code") as told:
        CausalLmSettings(checkpoint=str(base)).form(text_settings(folder).spec())
    (tmp_path / "run").mkdir()
    section = {"type": "causal_lm", "checkpoint": str(base)}
    save_state(
        {"policy": {"x": torch.ones(1)}, "config": {"policy": section}, "version": 1}, tmp_path / "run" / "policy.pt"
    )
    for words in (
        ["policies", "inspect", str(base)],
        ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")],
        ["train", "quickstart_lm", "--check", f"policy={json.dumps(section)}", f"env.tokenizer={folder}"],
    ):
        assert main(words) == (1 if "--check" in words else 2)
        printed = capsys.readouterr()
        assert "files of torch.save can run code" in " ".join((printed.out + printed.err).split())
    command = str(told.value).split("convert them: ")[1].removesuffix(", and name NEW")
    monkeypatch.chdir(tmp_path)
    exec(shlex.split(command)[2])
    new = load_file(tmp_path / "NEW" / "model.safetensors")
    assert all(torch.equal(tensor, new[name]) for name, tensor in state.items())
    CausalLmSettings(checkpoint="NEW").form(text_settings(folder).spec())


def test_a_folder_that_is_no_causal_language_model_is_refused(folder: Path, tmp_path: Path) -> None:
    spec = text_settings(folder).spec()

    def told(name: str, content: object = None) -> str:
        path = tmp_path / name
        if content is not None:
            path.mkdir()
            (path / "config.json").write_text(json.dumps(content))
        with pytest.raises((ConfigError, MissingError)) as raised:
            CausalLmSettings(checkpoint=str(path)).form(spec)
        return str(raised.value)

    encoder = {"model_type": "bert", "architectures": ["BertModel"]}
    assert "it holds a BertModel, which is no causal language model" in told("encoder", encoder)
    assert "there is no such folder" in told("none")
    (tmp_path / "empty").mkdir()
    assert "it has no config.json; name the folder of a causal language model" in told("empty")
    assert "is of no model that transformers knows" in told("odd", {"model_type": "nothing_known"})
    assert "it holds a t5 model, which is no causal language model" in told("t5", {"model_type": "t5"})
    assert "it holds no safetensors; a folder with model.safetensors" in told("bare", {"model_type": "llama"})


def test_weights_that_lack_a_tensor_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    section = CausalLmSettings(checkpoint=str(tmp_path))
    with pytest.raises(ConfigError, match=r"its weights lack model.norm.weight"):
        section.build(text_settings(folder).spec(), seed=0, device="cpu", role="act")


def test_another_tokenizer_than_the_models_is_refused(folder: Path) -> None:
    spec = text_settings(folder).spec()
    larger = EnvSpec(
        spec.observation,
        ActionSpec("discrete", 1, choices=9999, stops=(1,)),
        spec.tasks,
        1,
        chunk=12,
    )
    with pytest.raises(ConfigError, match=r"embeddings of 408 ids, the environment's tokenizer ids below 9999; set"):
        CausalLmSettings(checkpoint=str(folder)).form(larger)


@pytest.mark.parametrize(
    ("choices", "stops", "told"),
    [
        (
            VOCABULARY - 50,
            (1,),
            r"its own tokenizer has ids below \d+, the environment's ids below 350; set env\.tokenizer to the same",
        ),
        (
            0,
            (7, 5),
            r"its end of text is token 2, the environment's messages end at 5, 7; set env\.tokenizer to the same",
        ),
    ],
    ids=["size", "end of text"],
)
def test_a_tokenizer_that_fits_and_is_not_the_models_is_refused(
    folder: Path, choices: int, stops: tuple[int, ...], told: str
) -> None:
    spec = text_settings(folder).spec()
    action = ActionSpec("discrete", 1, choices=choices or spec.action.choices, stops=stops)
    with pytest.raises(ConfigError, match=told):
        CausalLmSettings(checkpoint=str(folder)).form(replace(spec, action=action))
    CausalLmSettings(checkpoint=str(folder)).form(spec)


def with_gap(folder: Path, gap: int) -> None:
    """Move the end of text behind a gap in the folder's ids, as released tokenizers have it."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["<eos>"] = max(vocabulary.values()) + gap
    for token in content["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("gap", "fits"), [(9, True), (250, True), (251, False), (400, False)])
def test_a_model_has_embeddings_up_to_the_largest_id(folder: Path, tmp_path: Path, gap: int, fits: bool) -> None:
    found = tmp_path / "model"
    shutil.copytree(folder, found)
    with_gap(found, gap)
    spec = text_settings(found).spec()
    tokens = folder_tokenizer(str(folder)).size
    assert spec.action.choices == max(spec.action.stops) + 1 == tokens + gap
    section = CausalLmSettings(checkpoint=str(found))
    if fits:
        section.form(spec)
        return
    with pytest.raises(
        ConfigError, match=r"it has embeddings of 408 ids, the environment's tokenizer ids below \d+; set"
    ):
        section.form(spec)


def test_an_environment_without_text_is_refused() -> None:
    action = ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,))
    spec = EnvSpec({"state": ArraySpec((3,), "float32")}, action, (Task("a", "a"),), 5)
    with pytest.raises(ConfigError, match="no text environment"):
        CausalLmSettings().form(spec)


def test_a_folders_model_is_told_with_the_lines_of_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "architecture  causal_lm (llama)\n" in told
    assert f"policy: {{type: causal_lm, checkpoint: {folder}}}" in told
    assert main(["policies", "inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tensors = load_file(folder / "model.safetensors")
    assert found["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert (found["vocabulary"], found["context"], found["tokenizer"]) == (VOCABULARY + 8, 64, True)
