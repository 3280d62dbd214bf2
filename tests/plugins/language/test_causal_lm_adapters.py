"""The policy `causal_lm` with adapters: what is trained and published, and folders that peft and transformers read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.plugins.language.test_causal_lm import ENV, TINY, folder, observations, text_settings  # noqa: F401 - a fixture
from torch import Tensor

from polyrhythm.cli.main import main
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE, CausalLm, CausalLmSettings
from polyrhythm.plugins.trial.policy_contract import policy_checks
from polyrhythm.policies.engine import EngineRequest
from polyrhythm.training.checkpoint import save_state

LORA: dict[str, Any] = {"train": "lora", "lora": {"rank": 4, "alpha": 8.0}}


def built(role: str = "train", **settings: Any) -> CausalLm:
    section = CausalLmSettings.model_validate({**TINY, **LORA, **settings})
    return section.build(ENV.spec(), seed=0, device="cpu", role=role).eval()  # type: ignore[arg-type]


def changed(policy: CausalLm) -> CausalLm:
    """With adapters that add something."""
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
    return policy


def logprobs(policy: CausalLm) -> Tensor:
    message = torch.arange(80).view(4, 20) % 15 + 1
    return policy.evaluate(observations(ENV, 4), {MESSAGE: message}).logprob


def test_it_keeps_the_contract_and_publishes_adapters_alone() -> None:
    section = CausalLmSettings.model_validate({**TINY, **LORA})
    for check in policy_checks(section, observations(ENV, 6), ENV.spec(), imitates=True).values():
        check()
    form = section.form(ENV.spec())
    assert all(".lora_" in name for name in form.published)
    assert len(form.published) == 2 * 7 * 2, "A and B of seven matrices in two layers, none of the logits"
    assert 0 < form.trainable_bytes < form.train_bytes - form.trainable_bytes
    whole = built(train="all")
    assert whole.published().keys() == whole.state_dict().keys()


def test_fresh_adapters_change_nothing_and_a_generator_follows_the_trainers() -> None:
    trainer, generator = built(), built("act")
    base = built(train="all")
    torch.testing.assert_close(logprobs(trainer), logprobs(base))
    before = logprobs(generator).detach()
    generator.load_state_dict(changed(trainer).published(), strict=False)
    torch.testing.assert_close(logprobs(generator), logprobs(trainer))
    assert (logprobs(generator) - before).abs().max() > 0.01
    engine = generator.make_engine(2)
    engine.weights_changed(1)
    engine.add(EngineRequest(0, torch.arange(1, 9, dtype=torch.int32).numpy(), 12, False, 3))
    found = engine.step()
    while not found:
        found = engine.step()
    obs = {"tokens": torch.arange(1, 37, dtype=torch.int32)[None], "length": torch.tensor([8])}
    message = torch.zeros(1, 20, dtype=torch.int32)
    message[0, : len(found[0].tokens)] = torch.from_numpy(found[0].tokens)
    exact = trainer.evaluate(obs, {MESSAGE: message}).logprob[0, : len(found[0].tokens), 0]
    torch.testing.assert_close(torch.from_numpy(found[0].logprobs), exact.detach(), atol=1e-5, rtol=0)


def test_the_reference_policy_is_the_model_without_its_adapters() -> None:
    policy = built()
    state, before = policy.reference_state(), logprobs(policy).detach()
    assert state == {}
    changed(policy)
    with policy.as_reference(state):
        torch.testing.assert_close(logprobs(policy), before)
    assert (logprobs(policy) - before).abs().max() > 0.01


def test_layers_that_are_computed_again_give_the_same_gradients_from_less() -> None:
    found, saved = [], []
    for again in (False, True):
        policy, kept = built(train="all", gradient_checkpointing=again), [0]

        def pack(x: Tensor, kept: list[int] = kept) -> Tensor:
            kept[0] += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            total = logprobs(policy).sum()
        total.backward()
        found.append([p.grad for p in policy.parameters()])
        saved.append(kept[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert saved[1] < saved[0] / 2


@pytest.mark.parametrize("name", ["lm_head", "*.q_prj.weight"])
def test_targets_that_are_no_linear_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.lora\.targets = .*: matches the weight of no linear layer"):
        built(lora={"targets": [name]})


# ------------------------------------------------------------ folders


def run_of(path: Path, section: CausalLmSettings, policy: CausalLm) -> Path:
    """A folder with the run's last policy."""
    path.mkdir()
    content = {"policy": policy.published(), "config": {"policy": section.model_dump()}, "version": 3}
    save_state(content, path / "policy.pt")
    return path


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["policies", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_adapters_are_read_by_peft_and_merged_for_transformers(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    section = CausalLmSettings.model_validate({"checkpoint": str(folder), **LORA})
    policy = changed(section.build(text_settings(folder).spec(), seed=0, device="cpu", role="train").eval())
    run = run_of(tmp_path / "run", section, policy)
    assert told(capsys, "export", run, "--out", tmp_path / "adapters")["exported"] == "adapters"
    assert told(capsys, "inspect", tmp_path / "adapters")["adapters"] == 14
    merged = tmp_path / "merged"
    assert told(capsys, "merge", tmp_path / "adapters", "--out", merged, "--base", folder)["merged"] == 14
    assert {path.name for path in folder.iterdir()} == {path.name for path in merged.iterdir()}

    tokens = torch.arange(18).view(2, 9)
    ours = policy.network.model(tokens).logits
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "adapters")(tokens).logits, ours)
    own = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(own(tokens).logits, ours, atol=0.05, rtol=0.0)  # the folder's bfloat16
    again = CausalLmSettings(checkpoint=str(merged)).build(
        text_settings(folder).spec(), seed=0, device="cpu", role="act"
    )
    torch.testing.assert_close(again.network.model(tokens).logits, own(tokens).logits)


def test_a_model_that_was_trained_whole_is_written_in_its_folders_layout(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = CausalLmSettings(checkpoint=str(folder))
    policy = section.build(text_settings(folder).spec(), seed=0, device="cpu", role="train")
    run = run_of(tmp_path / "same", section, policy)
    assert told(capsys, "export", run, "--out", tmp_path / "a")["exported"] == "network"
    for path in folder.iterdir():
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes(), path.name
    with torch.no_grad():
        policy.network.model.model.norm.weight += 1.0
    run = run_of(tmp_path / "other", section, policy)
    told(capsys, "export", run, "--out", tmp_path / "b")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "b"))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["model.norm.weight"]


def test_a_folder_that_holds_a_tied_tensor_twice_gets_its_trained_value_twice(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    both = Path(shutil.copytree(folder, tmp_path / "both"))
    tensors = load_file(both / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, both / "model.safetensors", metadata={"format": "pt"})
    section = CausalLmSettings(checkpoint=str(both))
    policy = section.build(text_settings(folder).spec(), seed=0, device="cpu", role="train")
    with torch.no_grad():
        policy.network.model.model.embed_tokens.weight += 1.0
    told(capsys, "export", run_of(tmp_path / "run", section, policy), "--out", tmp_path / "out")
    tokens = torch.arange(18).view(2, 9)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(again(tokens).logits, policy.network.model(tokens).logits, atol=0.3, rtol=0.0)


def test_adapters_on_a_model_from_a_seed_are_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = CausalLmSettings.model_validate({**TINY, **LORA})
    run = run_of(tmp_path / "run", section, built())
    assert main(["policies", "export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "it has adapters on a network from a seed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
