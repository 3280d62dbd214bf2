"""From observations to each network's inputs and back, and what does not fit is said before the start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from tests.plugins.pretrained.small_tokenizer import write_tokenizer
from torch import Tensor, nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.vla import images
from polyrhythm.plugins.vla.input_plan import InputForm, plan_inputs
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.prompts import folder_tokenizer
from polyrhythm.plugins.vla.settings import VlaSettings
from polyrhythm.policies.form import describe
from polyrhythm.specs import INSTRUCTION, ActionSpec, ArraySpec, EnvSpec, Task

TASKS = (Task("push", "push the red block"), Task("close", "close the door"))
IMAGE = ArraySpec((48, 64, 3), "uint8")
LOW, HIGH = (-1.0, 0.0, -5.0), (1.0, 4.0, 5.0)
SPEC = EnvSpec(
    {"front": IMAGE, "wrist": IMAGE, "proprio": ArraySpec((4,), "float32")},
    ActionSpec("continuous", 3, low=LOW, high=HIGH),
    TASKS,
    50,
)
PI0 = InputForm(architecture="pi0", image=42, horizon=6, action_dim=8, state_dim=8, vocabulary=4096, length=12)
PI05 = replace(PI0, architecture="pi05", state_in_prompt=True, length=40)
OFT = InputForm(
    architecture="openvla_oft",
    image=42,
    horizon=6,
    action_dim=7,
    vocabulary=800,
    words=512,
    fill="inside",
    bos=1,
    pad=799,
    empty=3,
    needs_state=False,
)
GROOT = InputForm(
    architecture="groot_n1d5",
    image=42,
    horizon=6,
    action_dim=8,
    state_dim=10,
    vocabulary=1000,
    words=900,
    fill="left",
    image_token=999,
    image_tokens=9,
    embodiments=32,
)
FORMS = {form.architecture: form for form in (PI0, PI05, OFT, GROOT)}
STATS = {"mean": [0.5, 1.0, 0.0, 2.0], "std": [2.0, 0.5, 1.0, 4.0]}
ACTIONS = {"mean": [0.25, 1.0, 0.0], "std": [0.25, 0.5, 1.0]}
ENDS = {"q01": [-1.0] * 5, "q99": [1.0] * 5}


class Given(VlaSettings):
    type: Literal["pi0"] = "pi0"
    size: Literal["released"] = "released"


def settings_of(**given: Any) -> VlaSettings:
    return Given(chunk=2, **given)


def inputs_of(form: InputForm, spec: EnvSpec = SPEC, source: Checkpoint | None = None, **given: Any) -> VlaInputs:
    return VlaInputs(plan_inputs(settings_of(**given), spec, form, source))


def observations(rows: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "front": torch.randint(0, 256, (rows, 48, 64, 3), generator=generator).to(torch.uint8),
        "wrist": torch.randint(0, 256, (rows, 48, 64, 3), generator=generator).to(torch.uint8),
        "proprio": torch.randn(rows, 4, generator=generator) * 0.7,
        INSTRUCTION: torch.arange(rows) % 2,
    }


def folder_of(
    folder: Path, state: Mapping[str, Any] = STATS, actions: Mapping[str, Any] = ACTIONS, **config: Any
) -> Checkpoint:
    """A folder with openpi's statistics and a network of one number."""
    file = folder / "assets" / "arm" / "norm_stats.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"norm_stats": {"state": state, "actions": actions}}))
    (folder / "config.json").write_text(json.dumps({"polyrhythm": {"tokenizer": "words"}} | config))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def test_pi0_gets_images_prompt_and_padded_state() -> None:
    obs = observations()
    found = inputs_of(PI0)(obs)
    assert {name: (tuple(x.shape), x.dtype) for name, x in found.items()} == {
        "images": ((3, 2, 3, 42, 42), torch.float32),
        "image_present": ((3, 2), torch.bool),
        "tokens": ((3, 12), torch.int64),
        "token_present": ((3, 12), torch.bool),
        "state": ((3, 8), torch.float32),
    }
    assert torch.equal(found["images"][:, 1], images.pi0_images(obs["wrist"], 42))
    assert torch.equal(found["state"], torch.nn.functional.pad(obs["proprio"], (0, 4)))
    assert torch.equal(found["tokens"][0], found["tokens"][2])
    assert not torch.equal(found["tokens"][0], found["tokens"][1])
    assert found["token_present"].sum(1).tolist() == [6, 5, 6]  # begin, words, line end


def test_openvla_oft_gets_channels_and_a_prompt_with_filling_inside() -> None:
    obs = observations()
    found = inputs_of(OFT)(obs)
    assert found["pixel_values"].shape == (3, 12, 42, 42)
    assert torch.equal(found["pixel_values"][:, 6:], images.oft_images(obs["wrist"], 42))
    assert torch.equal(found["state"], obs["proprio"])
    assert found["input_ids"][:, 0].tolist() == [1, 1, 1]
    assert found["input_ids"][:, -1].tolist() == [3, 3, 3]
    assert found["input_ids"][1, 1] == 799
    assert found["attention_mask"].sum(1).tolist() == [16, 15, 16]


def test_groot_gets_places_for_every_image() -> None:
    found = inputs_of(GROOT)(observations())
    assert found["images"].shape == (3, 2, 3, 42, 42)
    assert (found["input_ids"] == 999).sum(1).tolist() == [18, 18, 18]
    assert found["attention_mask"][:, 0].tolist() == [True, False, True]
    assert found["state"].shape == (3, 10)


def test_pi05_reads_the_normalised_state_in_its_prompt(tmp_path: Path) -> None:
    ends = {"q01": [-2.0] * 4, "q99": [2.0] * 4}
    inputs = inputs_of(PI05, source=folder_of(tmp_path, ends, {"q01": [-1.0] * 3, "q99": [1.0] * 3}))
    obs = observations()
    found = inputs(obs)
    obs["proprio"][0, 2] += 4.0 / 256.0 * 1.001  # one bin
    again = inputs(obs)
    assert (found["tokens"] != again["tokens"]).sum(1).tolist() == [1, 0, 0]
    assert found["token_present"].sum(1).tolist()[0] == 1 + 5 + 1 + 4 + 2


NORMALIZER = {"registry_name": "normalizer_processor", "config": {"norm_map": {"STATE": "QUANTILES"}}}
BINNED = {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}}
NEW_LINE = {"registry_name": "pi0_new_line_processor", "config": {}}
RELATIVE = {"registry_name": "relative_actions_processor", "config": {"enabled": False}}
BUFFER = "normalize_inputs.buffer_observation_state.mean"


def lerobot_folder(
    folder: Path, *steps: dict[str, Any], tensors: tuple[str, ...] = ("x",), **config: Any
) -> Checkpoint:
    """A folder as lerobot saves it, with these steps in policy_preprocessor.json; none without steps."""
    own = {"type": "pi05", "polyrhythm": {"tokenizer": "words"}, "input_features": {}}
    (folder / "config.json").write_text(json.dumps(own | config))
    ends = {"q01": torch.full((4,), -2.0), "q99": torch.full((4,), 2.0), "mean": torch.zeros(4), "std": torch.ones(4)}
    stats = {f"observation.state.{name}": x for name, x in ends.items()}
    stats |= {f"action.{name}": x[:3].clone() for name, x in ends.items()}
    if steps:
        (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [NORMALIZER, *steps]}))
        save_file(stats, folder / "policy_preprocessor_step_2_normalizer_processor.safetensors")
    save_file({name: torch.zeros(4) for name in tensors}, folder / "model.safetensors")
    return Checkpoint.open(folder)


FILLED = " 128" * 28
STATE_PROMPT = "Task: push the red block, State: -1 0 128 255%s;\nAction: "


@pytest.mark.parametrize(
    ("steps", "config", "filling"),
    [
        ((BINNED,), {}, FILLED),
        ((BINNED,), {"max_state_dim": 6}, " 128 128"),
        ((BINNED,), {"max_state_dim": 3}, ""),
        ((RELATIVE, BINNED), {}, ""),
        ((BINNED,), {"use_relative_actions": False}, ""),
        ((), {}, FILLED),
        (None, {}, ""),
    ],
    ids=["0.4", "narrow", "too narrow", "0.5.1", "0.5.1 by its configuration", "without processors", "openpi"],
)
def test_pi05_prompts_are_made_as_by_the_folders_code(
    tmp_path: Path, steps: tuple[dict[str, Any], ...] | None, config: dict[str, Any], filling: str
) -> None:
    """lerobot 0.4 fills the normalised state up to 32 entries before it writes bins; 0.5 and openpi do not."""
    if steps is None:
        source = folder_of(tmp_path, {"q01": [-2.0] * 4, "q99": [2.0] * 4}, {"q01": [-1.0] * 3, "q99": [1.0] * 3})
    else:
        source = lerobot_folder(tmp_path, *steps, **config)
    tokenizer = folder_tokenizer(str(write_tokenizer(tmp_path)))
    robot = {"robot": "bounds"} if steps == () else {}
    obs = observations(1) | {"proprio": torch.tensor([[-2.1, -2.0, 0.01, 2.0]]) / (2.0 if robot else 1.0)}
    form = replace(PI05, length=400)
    found = inputs_of(form, source=source, tokenizer=str(tmp_path), **robot)(obs)
    expected = [tokenizer.bos, *tokenizer.encode(STATE_PROMPT % filling)]
    assert found["tokens"][0][: len(expected)].tolist() == expected
    assert found["token_present"].sum(1).tolist() == [len(expected)]


@pytest.mark.parametrize(("lerobot", "text"), [(True, " push_the block\n"), (False, "push the block\n")])
def test_pi0_prompts_are_made_as_by_the_folders_code(tmp_path: Path, lerobot: bool, text: str) -> None:
    given = " push_the block"
    source = lerobot_folder(tmp_path, NEW_LINE, type="pi0") if lerobot else folder_of(tmp_path)
    tokenizer = folder_tokenizer(str(write_tokenizer(tmp_path / "tokenizer")))
    spec = replace(SPEC, tasks=(Task("push", given), Task("close", "close")))
    found = inputs_of(replace(PI0, length=40), spec, source, tokenizer=str(tmp_path / "tokenizer"))
    ids = found(observations(1))["tokens"][0]
    expected = [tokenizer.bos, *tokenizer.encode(text)]
    assert ids[: len(expected)].tolist() == expected


def interpolated(image: Tensor, around: float, *, centred: bool) -> Tensor:
    """An image [48,64,3] of a lerobot folder at 42 pixels, as torch does it: 31 of 42 rows."""
    x = image.permute(2, 0, 1)[None].float() / 255.0
    small = torch.nn.functional.interpolate(x, size=(31, 42), mode="bilinear", align_corners=False)
    above = 5 if centred else 11
    return torch.nn.functional.pad(small, (0, 0, above, 11 - above), value=around)[0] * 2.0 - 1.0


@pytest.mark.parametrize(
    ("steps", "given", "around", "centred"),
    [
        ((BINNED,), {}, -1.0, True),
        ((RELATIVE, BINNED), {}, 0.0, True),
        ((), {"type": "pi0", "resize_imgs_with_padding": [224, 224]}, 0.0, False),
        ((), {"type": "pi0", "tensors": ("x", BUFFER)}, 0.0, False),
        ((NEW_LINE,), {"type": "pi0", "tensors": ("x", BUFFER)}, -1.0, True),
    ],
    ids=["0.4", "0.5.1", "0.3", "0.3 by its buffers", "migrated"],
)
def test_pictures_are_resized_as_by_the_folders_code(
    tmp_path: Path, steps: tuple[dict[str, Any], ...], given: dict[str, Any], around: float, centred: bool
) -> None:
    """lerobot does not antialias; 0.4 pads with -3, 0.5 with -1, 0.3 above and left alone."""
    source, obs = lerobot_folder(tmp_path, *steps, **given), observations()
    seen = inputs_of(PI0, source=source, robot="bounds")(obs)["images"]
    assert torch.allclose(seen[1, 0], interpolated(obs["front"][1], around, centred=centred), atol=1e-6)
    assert seen.min() == around * 2.0 - 1.0
    square = replace(PI0, image=64)
    same = {name: ArraySpec((64, 64, 3), "uint8") if spec == IMAGE else spec for name, spec in SPEC.observation.items()}
    obs = {name: x.repeat(1, 2, 1, 1)[:, :64] if x.dim() == 4 else x for name, x in obs.items()}
    fitting = inputs_of(square, replace(SPEC, observation=same), source, robot="bounds")(obs)["images"]
    assert torch.equal(fitting[:, 0], images.pi0_images(obs["front"], 64)), "nothing to resize: all ways are alike"


def test_relative_actions_of_a_folder_need_the_setting(tmp_path: Path) -> None:
    source = lerobot_folder(tmp_path, RELATIVE | {"config": {"enabled": True}}, BINNED)
    with pytest.raises(ConfigError, match=r"policy.relative_entries = 0: by its policy_preprocessor.json .* set it to"):
        plan_inputs(settings_of(robot="bounds"), SPEC, PI0, source)
    plan = plan_inputs(settings_of(robot="bounds", relative_entries=2), SPEC, PI0, source)
    assert plan.actions.relative == 2


@pytest.mark.parametrize("steps", [["normalizer_processor"], [BINNED | {"config": [3]}]])
def test_a_broken_step_is_one_sentence(tmp_path: Path, steps: list[Any]) -> None:
    lerobot_folder(tmp_path, BINNED)
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    with pytest.raises(ConfigError, match=r"policy_preprocessor.json: .*; copy it again from its release"):
        plan_inputs(settings_of(), SPEC, PI05, Checkpoint.open(tmp_path))


def test_a_broken_width_of_the_state_is_one_sentence(tmp_path: Path) -> None:
    source = lerobot_folder(tmp_path, BINNED, max_state_dim="32")
    with pytest.raises(ConfigError, match=r"config.json has max_state_dim = '32', which is not a number; copy"):
        plan_inputs(settings_of(), SPEC, PI05, source)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_are_computed_alone(form: InputForm) -> None:
    inputs, obs = inputs_of(form), observations(4)
    together = inputs(obs)
    for row in range(4):
        alone = inputs({name: x[row : row + 1] for name, x in obs.items()})
        assert all(torch.equal(alone[name][0], together[name][row]) for name in together)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_made_without_memory_and_saves_nothing(form: InputForm) -> None:
    plan = plan_inputs(settings_of(), SPEC, form, None)

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = VlaInputs(plan)
            self.chunk, self.action_dim = self.inputs.chunk, self.inputs.action_dim

    found = describe(lambda _role: Policy(), {})
    assert (found.chunk, found.action_dim, found.published) == (2, 3, {})
    assert found.act_bytes == sum(x.nbytes for x in Policy().buffers())


def test_cameras_of_different_size_and_turned() -> None:
    small = SPEC.observation | {"wrist": ArraySpec((32, 32, 3), "uint8")}
    obs = observations() | {"wrist": torch.randint(0, 256, (3, 32, 32, 3)).to(torch.uint8)}
    found = inputs_of(PI0, replace(SPEC, observation=small), turn_images=True)(obs)
    assert torch.equal(found["images"][:, 0], images.pi0_images(obs["front"].flip(1, 2), 42))
    assert torch.equal(found["images"][:, 1], images.pi0_images(obs["wrist"].flip(1, 2), 42))


def test_cameras_are_chosen_by_name_and_kept_in_the_policys_order() -> None:
    obs = observations()
    found = inputs_of(PI0, cameras={"right_wrist_0_rgb": "wrist", "base_0_rgb": "front"})(obs)
    assert torch.equal(found["images"][:, 0], images.pi0_images(obs["front"], 42))
    only = inputs_of(PI0, cameras={"left_wrist_0_rgb": "wrist"})(obs)
    assert torch.equal(only["images"], images.pi0_images(obs["wrist"], 42).unsqueeze(1))


def test_cameras_have_the_names_of_the_folder(tmp_path: Path) -> None:
    feature = {"type": "VISUAL", "shape": [3, 42, 42]}
    names = {f"observation.images.{name}": feature for name in ("top", "hand", "empty_camera_0")}
    plan = plan_inputs(settings_of(), SPEC, PI0, folder_of(tmp_path, input_features=names))
    assert plan.cameras == (("top", "front"), ("hand", "wrist"))


def test_cameras_that_the_folder_has_and_the_environment_lacks_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"observation.images.{name}": {"type": "VISUAL"} for name in ("top", "left", "right")}
    source = folder_of(tmp_path, input_features=names)
    for _ in range(2):
        assert plan_inputs(settings_of(), SPEC, PI0, source).cameras == (("top", "front"), ("left", "wrist"))
    (record,) = caplog.records
    told = r"has 3 cameras \(top, left, right\), the environment 2 \(front .*: without an image, so masked: right;"
    assert re.search(told, record.getMessage())
    caplog.clear()
    plan_inputs(settings_of(cameras={"left": "wrist"}), SPEC, PI0, source)
    plan_inputs(settings_of(), SPEC, PI0, None)
    assert caplog.records == []


def test_a_form_beside_a_folder_is_told_to_be_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sized(Given):
        size: int = 3

    source = folder_of(tmp_path)
    for size in (3, 4, 4):
        plan_inputs(Sized(size=size), SPEC, PI0, source)
    plan_inputs(Sized(size=4), SPEC, PI0, None)
    (record,) = caplog.records
    told = f"policy.size is not used: checkpoint = {tmp_path} has a network of its own; leave policy.size out"
    assert record.getMessage() == told


def test_a_state_that_only_the_value_reads_may_be_left_out(tmp_path: Path) -> None:
    stats = {"arm": {"proprio": ENDS, "action": {name: ends[:3] for name, ends in ENDS.items()}}}
    narrow = replace(OFT, action_dim=3)
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(stats))
    (tmp_path / "config.json").write_text(json.dumps({"polyrhythm": {"tokenizer": "words"}}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    source = Checkpoint.open(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'proprio' has 4 entries, .* statistics of 5; .* leave out .*\"policy.state=''\""
    ):
        plan_inputs(settings_of(), SPEC, narrow, source)
    assert plan_inputs(settings_of(state=""), SPEC, narrow, source).state_scaling.size == 0


def test_statistics_of_another_network_are_refused(tmp_path: Path) -> None:
    """OpenVLA-OFT's network predicts as many entries as its statistics have; π0's may predict more, not fewer."""
    stats = {"arm": {"action": {name: ends[:3] for name, ends in ENDS.items()}}}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(stats))
    (tmp_path / "config.json").write_text(json.dumps({"polyrhythm": {"tokenizer": "words"}}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    told = r"dataset_statistics.json has statistics of 3 action entries of arm, the network predicts 7; copy that file"
    for entries in ([], [0, 1, 2]):
        with pytest.raises(ConfigError, match=told):
            plan_inputs(settings_of(state="", entries=entries), SPEC, OFT, Checkpoint.open(tmp_path))
    with pytest.raises(ConfigError, match="of 3 action entries of arm, the network predicts 2"):
        plan_inputs(settings_of(), SPEC, replace(PI0, action_dim=2), folder_of(tmp_path / "pi0"))


def test_without_statistics_actions_fill_the_environments_bounds() -> None:
    inputs, obs = inputs_of(PI0), observations(1)
    x = torch.tensor([[[-1.0, 0.0, 1.0], [2.0, -3.0, 0.5]]])
    found = inputs.actions(x, obs)
    assert torch.allclose(found, torch.tensor([[[-1.0, 2.0, 5.0], [1.0, 0.0, 2.5]]]))
    assert torch.allclose(inputs.normalised_actions(found, obs), x.clamp(-1.0, 1.0))


def test_executed_takes_the_first_actions_and_the_chosen_entries() -> None:
    x = torch.arange(2 * 6 * 8).view(2, 6, 8)
    assert torch.equal(inputs_of(PI0).executed(x), x[:, :2, :3])
    assert torch.equal(inputs_of(PI0, entries=[0, 5, 2]).executed(x), x[:, :2, [0, 5, 2]])
    scores = torch.randn(2, 6, 8, 5)
    assert torch.equal(inputs_of(PI0, entries=[0, 5, 2]).executed(scores), scores[:, :2, [0, 5, 2]])


def test_statistics_scale_actions_and_relative_ones_start_at_the_state(tmp_path: Path) -> None:
    source, obs = folder_of(tmp_path), observations(2)
    x = torch.tensor([[[0.5, 1.0, -1.0], [0.0, 0.0, 0.0]]]).expand(2, -1, -1)
    plain = inputs_of(PI0, source=source)
    expected = torch.tensor([[0.375, 1.5, -1.0], [0.25, 1.0, 0.0]])
    assert torch.allclose(plain.actions(x, obs), expected.expand(2, -1, -1), atol=1e-5)
    obs["proprio"] = torch.tensor([[0.1, 0.2, 0.3, 0.4], [-0.1, 0.5, 0.0, 0.0]])
    relative = inputs_of(PI0, source=source, relative_entries=2)
    moved = expected + torch.nn.functional.pad(obs["proprio"][:, None, :2], (0, 1))
    found = relative.actions(x, obs)
    assert torch.allclose(found, moved, atol=1e-5)
    assert torch.allclose(relative.normalised_actions(found, obs), x, atol=1e-5)
    normal = relative(obs)["state"]
    assert torch.allclose(normal[:, 3], (obs["proprio"][:, 3] - 2.0) / 4.0, atol=1e-5)


def test_an_open_gripper_is_minus_one() -> None:
    spec = replace(SPEC, action=ActionSpec("continuous", 3, low=(0.0, 0.0, -1.0), high=(1.0, 1.0, 1.0)))
    inputs, obs = inputs_of(OFT, spec, gripper="open_is_one"), observations(1)
    x = torch.tensor([[[0.0, 0.0, 0.9], [0.0, 0.0, 0.1]]])
    found = inputs.actions(x, obs)
    assert found[0, :, 2].tolist() == [-1.0, 1.0]
    assert inputs.normalised_actions(found, obs)[0, :, 2].tolist() == [1.0, 0.0]


def test_padded_statistics_of_the_state_are_cut(tmp_path: Path) -> None:
    padded = {name: values + [0.0] * 4 for name, values in STATS.items()}
    found = inputs_of(PI0, source=folder_of(tmp_path, padded))(observations())
    assert found["state"].shape == (3, 8)
    assert not found["state"][:, 4:].any()


def test_statistics_of_a_wider_state_are_not_cut(tmp_path: Path) -> None:
    wider = {"mean": STATS["mean"] + [0.0] * 4, "std": STATS["std"] + [0.1] * 4}
    with pytest.raises(ConfigError, match=r"'proprio' has 4 entries, .*norm_stats.json has statistics of 8; make"):
        inputs_of(PI0, source=folder_of(tmp_path, wider))


def test_padded_statistics_of_actions_are_cut(tmp_path: Path) -> None:
    source = folder_of(tmp_path)
    file = tmp_path / "assets" / "arm" / "norm_stats.json"
    stats = json.loads(file.read_text())
    narrow = inputs_of(PI0, source=source)
    x = torch.linspace(-1.0, 1.0, 6 * 8).view(1, 6, 8)
    expected = narrow.actions(narrow.executed(x), observations(1))
    stats["norm_stats"]["actions"] = {name: values + [0.0] * 5 for name, values in ACTIONS.items()}
    file.write_text(json.dumps(stats))
    found = inputs_of(PI0, source=source)
    assert torch.equal(found.actions(found.executed(x), observations(1)), expected)
    stats["norm_stats"]["actions"]["std"][5] = 1.0
    file.write_text(json.dumps(stats))
    with pytest.raises(ConfigError, match=r"takes actions of 3 entries and .*norm_stats.json has statistics of 8"):
        inputs_of(PI0, source=source)


def test_openvla_oft_needs_no_state() -> None:
    blind = replace(SPEC, observation={"front": IMAGE})
    inputs = inputs_of(OFT, blind)
    assert inputs.state_dim == 0
    assert inputs(observations())["state"].shape == (3, 0)


def test_openvla_oft_takes_the_value_ranges_of_its_folder(tmp_path: Path) -> None:
    ranges = [{"mean": [0.25] * 3, "std": [0.5] * 3}, {"mean": [0.0] * 3, "std": [1.0] * 3}]
    source = folder_of(tmp_path, polyrhythm={"tokenizer": "words", "robot": "bounds"})
    own = inputs_of(OFT, source=source)(observations())["pixel_values"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"tvf_normalize_params": ranges}))
    found = inputs_of(OFT, source=source)(observations())["pixel_values"]
    plain = own[:, 3:6] * 0.5 + 0.5
    assert torch.allclose(found[:, 0:3], (plain - 0.25) / 0.5, atol=1e-6)
    assert torch.allclose(found[:, 9:12], own[:, 9:12] * 0.5 + 0.5, atol=1e-6)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"tvf_normalize_params": ranges[:1]}))
    with pytest.raises(ConfigError, match="tvf_normalize_params is not mean and std for two towers"):
        inputs_of(OFT, source=source)


def without(name: str) -> EnvSpec:
    return replace(SPEC, observation={key: spec for key, spec in SPEC.observation.items() if key != name})


FOUR = ActionSpec("continuous", 4, low=(-1.0,) * 4, high=(1.0,) * 4)


@pytest.mark.parametrize(
    ("form", "spec", "given", "expected"),
    [
        (PI0, replace(SPEC, observation={"proprio": ArraySpec((4,), "float32")}), {}, "needs an image, the .* proprio"),
        (PI0, SPEC, {"cameras": {"top": "front"}}, "policy.cameras names 'top', the policy's cameras are base_0_rgb"),
        (PI0, SPEC, {"cameras": {"base_0_rgb": "rear"}}, "cameras.base_0_rgb = 'rear': .*it has front .* wrist"),
        (
            PI0,
            replace(SPEC, observation=SPEC.observation | {"a": IMAGE, "b": IMAGE}),
            {},
            r"has 4 cameras \(front .*\) and the policy 3 \(base_0_rgb.*say in policy.cameras",
        ),
        (PI0, without("proprio"), {}, "policy.state = 'proprio': .* needs the robot's state.* name one of them"),
        (replace(PI0, state_dim=3), SPEC, {}, "policy.state = 'proprio' has 4 entries, the network takes 3"),
        (replace(OFT, state_dim=8, needs_state=True), SPEC, {}, "'proprio' has 4 entries, the network takes 8"),
        (replace(PI0, action_dim=2), SPEC, {}, "takes actions of 3 entries and the network predicts 2"),
        (PI0, SPEC, {"entries": [0, 1]}, r"policy.entries = \[0, 1\]: the environment takes 3 entries and .* 8"),
        (PI0, SPEC, {"entries": [0, 1, 8]}, "give 3 different numbers below 8"),
        (replace(PI0, horizon=1), SPEC, {}, "policy.chunk = 2: the network predicts 1 actions"),
        (PI0, SPEC, {"relative_entries": 4}, "relative_entries = 4, but the action has 3 entries and the state"),
        (PI0, SPEC, {"prompt_length": 4}, "task 'push' has 6 tokens .*the network takes 4"),
        (PI0, SPEC, {"tokenizer": "/no/such"}, "policy.tokenizer = /no/such: there is no such folder"),
        (GROOT, SPEC, {"embodiment": 40}, "policy.embodiment = 40: the network has 32 embodiments"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    form: InputForm, spec: EnvSpec, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        plan_inputs(settings_of(**given), spec, form, None)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "spec", "given", "expected"),
    [
        ({}, replace(SPEC, action=FOUR), {}, r"takes actions of 4 entries and .*norm_stats.json has statistics of 3"),
        ({}, SPEC, {"robot": "leg"}, "policy.robot = 'leg': .* has statistics of arm; set policy.robot"),
        (
            {},
            replace(SPEC, observation=SPEC.observation | {"proprio": ArraySpec((5,), "float32")}),
            {},
            "'proprio' has 5 entries, .*norm_stats.json has statistics of 4; make the environment",
        ),
        ({"polyrhythm": {}}, SPEC, {}, "it has no tokenizer; set policy.tokenizer to the folder"),
    ],
)
def test_what_does_not_fit_a_folder_is_one_sentence(
    tmp_path: Path, folder: dict[str, Any], spec: EnvSpec, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        plan_inputs(settings_of(**given), spec, PI0, folder_of(tmp_path, **folder))
    assert "\n" not in str(caught.value)


def test_groot_gets_sines_and_cosines_key_by_key(tmp_path: Path) -> None:
    ends = {"min": [-1.0] * 2, "max": [1.0] * 2, "mean": [0.0] * 2, "std": [1.0] * 2}
    keys = dict.fromkeys(("left_arm", "right_arm", "left_hand", "right_hand"), ends)
    (tmp_path / "experiment_cfg").mkdir()
    (tmp_path / "experiment_cfg" / "metadata.json").write_text(
        json.dumps({"gr1": {"statistics": {"state": keys, "action": keys}}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"polyrhythm": {"tokenizer": "words"}}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    spec = replace(
        SPEC,
        observation=SPEC.observation | {"proprio": ArraySpec((8,), "float32")},
        action=ActionSpec("continuous", 8, low=(-1.0,) * 8, high=(1.0,) * 8),
    )
    cameras = {"ego_view": "front"}
    inputs = inputs_of(replace(GROOT, state_dim=20), spec, Checkpoint.open(tmp_path), cameras=cameras)
    angles = torch.linspace(-2.0, 2.0, 8)[None]
    found = inputs(observations(1) | {"proprio": angles})["state"][0]
    expected = torch.cat([wave(part) for part in angles[0].split(2) for wave in (torch.sin, torch.cos)])
    assert torch.allclose(found[:16], expected)
    assert not found[16:].any()
    with pytest.raises(ConfigError, match=r"'proprio' has 8 entries \(16 in the network's form\), the network"):
        plan_inputs(settings_of(cameras=cameras), spec, GROOT, Checkpoint.open(tmp_path))


def test_groot_takes_the_cameras_that_its_folder_names(tmp_path: Path) -> None:
    tag = {"statistics": {}, "modalities": {"video": {"ego": {}, "left": {}, "right": {}}}}
    (tmp_path / "experiment_cfg").mkdir()
    (tmp_path / "experiment_cfg" / "metadata.json").write_text(json.dumps({"gr1": tag}))
    source = folder_of(tmp_path, polyrhythm={"tokenizer": "words", "robot": "bounds"})
    with pytest.raises(ConfigError, match=r"has 2 cameras .* and the policy 3 \(ego, left, right\)"):
        plan_inputs(settings_of(), SPEC, GROOT, source)
    plan = plan_inputs(settings_of(cameras={"ego": "wrist"}), SPEC, GROOT, source)
    assert plan.cameras == (("ego", "wrist"),)


def test_a_folder_that_was_made_here_says_how_it_is_read(tmp_path: Path) -> None:
    source = folder_of(tmp_path, polyrhythm={"tokenizer": "words", "robot": "bounds"})
    found, own = inputs_of(PI0, source=source), inputs_of(PI0)
    assert torch.equal(found(observations())["tokens"], own(observations())["tokens"])
    assert torch.equal(found(observations())["state"], own(observations())["state"])
