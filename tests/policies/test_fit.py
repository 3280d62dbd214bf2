"""What is particular to one policy: units, clipping, sentences, and the refusal of an environment that does not fit."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from tests.built import built

from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.flow_matching import FlowNoise
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla.heads import BinsSettings, FlowMatchingSettings
from polyrhythm.policies.tiny_vla.policy import TinyVla, TinyVlaSettings, word_ids, word_table
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

TASKS = (Task("push", "push the red block"), Task("close", "close the door"))
CONTINUOUS = ActionSpec("continuous", 2, low=(-1.0, 0.0), high=(1.0, 4.0))
DISCRETE = ActionSpec("discrete", 1, choices=2)
STATE = {"state": ArraySpec((3,), "float32")}
PICTURE = {"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((4,), "float32")}
PICTURE_SPEC = EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)


def picture_obs(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 256, (n, 16, 16, 3), generator=generator, dtype=torch.uint8),
        "proprio": torch.randn(n, 4, generator=generator),
        INSTRUCTION: torch.zeros(n, dtype=torch.int64),
        PROGRESS: torch.zeros(n),
    }


def test_gaussian_clips_the_action_and_keeps_the_draw() -> None:
    policy = GaussianSettings(init_log_std=2.0).build(
        EnvSpec(STATE, CONTINUOUS, TASKS, 50), seed=0, device="cpu", role="train"
    )
    obs = {"state": torch.zeros(200, 3)}
    act = policy.act(obs, torch.zeros(200, dtype=torch.bool), torch.arange(200))
    raw = act.forward_inputs["raw"]
    assert (raw.abs() > 1).any()
    expected = torch.tensor([0.0, 2.0]) + torch.tensor([1.0, 2.0]) * raw.clamp(-1, 1)
    torch.testing.assert_close(act.actions, expected)
    reference = torch.distributions.Normal(policy.actor(obs["state"]).view(200, 1, 2), math.exp(2.0)).log_prob(raw)
    torch.testing.assert_close(act.logprob, reference.detach())


def test_flat_observations_leave_out_instruction_and_scale_bytes() -> None:
    arrays = {"b": ArraySpec((2,), "uint8"), "a": ArraySpec((1,), "float32")}
    policy = CategoricalSettings(progress=True).build(
        EnvSpec(arrays, DISCRETE, TASKS, 50), seed=0, device="cpu", role="train"
    )
    obs = {
        "b": torch.tensor([[0, 255]], dtype=torch.uint8),
        "a": torch.tensor([[7.0]]),
        INSTRUCTION: torch.tensor([1]),
        PROGRESS: torch.tensor([0.5]),
    }
    assert policy.flat(obs).tolist() == [[7.0, 0.0, 1.0, 0.5]]


def test_tiny_vla_acts_in_bin_centres_of_the_environment() -> None:
    policy = built(TinyVlaSettings(head=BinsSettings(bins=4)), PICTURE_SPEC)
    act = policy.act(picture_obs(64), torch.zeros(64, dtype=torch.bool), torch.arange(64))
    assert sorted(act.actions[..., 0].unique().tolist()) == [-0.75, -0.25, 0.25, 0.75]
    assert sorted(act.actions[..., 1].unique().tolist()) == [0.5, 1.5, 2.5, 3.5]
    assert act.forward_inputs["tokens"].dtype == torch.int64


def test_tiny_vla_labels_are_soft_and_centred() -> None:
    policy = TinyVlaSettings(head=BinsSettings(bins=4, label_sigma=0.01)).build(
        PICTURE_SPEC, seed=0, device="cpu", role="train"
    )
    obs = picture_obs(5)
    act = policy.act(obs, torch.zeros(5, dtype=torch.bool), torch.arange(5))
    sharp = policy.sft_loss(obs, act.actions)
    torch.testing.assert_close(sharp, -act.logprob.mean())


@pytest.mark.parametrize("head", [BinsSettings(), FlowMatchingSettings(method=FlowNoise())])
def test_tiny_vla_is_tiny(head: BinsSettings | FlowMatchingSettings) -> None:
    spec = EnvSpec(
        {"image": ArraySpec((64, 64, 3), "uint8"), "proprio": ArraySpec((4,), "float32")},
        ActionSpec("continuous", 4, (-1.0,) * 4, (1.0,) * 4),
        TASKS,
        100,
    )
    assert sum(p.numel() for p in built(TinyVlaSettings(head=head), spec).parameters()) < 150_000


def test_weights_move_to_an_environment_with_other_instructions() -> None:
    more = EnvSpec(PICTURE, CONTINUOUS, (*TASKS, Task("open", "open the window")), 50)
    first, second = (
        built(TinyVlaSettings(), PICTURE_SPEC),
        built(TinyVlaSettings(), more, 1),
    )
    second.load_state_dict(first.state_dict())
    obs = picture_obs(3)
    torch.testing.assert_close(value_of(first, obs, 1), value_of(second, obs, 1))
    assert not torch.allclose(value_of(second, obs, 1), value_of(second, obs, 2))


def value_of(policy: TinyVla, obs: dict[str, torch.Tensor], instruction: int) -> torch.Tensor:
    return policy.value({**obs, INSTRUCTION: torch.full((3,), instruction)}).detach()


def test_words_ignore_case_and_punctuation() -> None:
    assert word_ids("Press the button!", 256) == word_ids("press, THE button", 256)
    assert word_table(TASKS, 5, 256)[1].tolist() == [*word_ids("close the door", 256), 0, 0]


@pytest.mark.parametrize(
    ("tasks", "words", "vocabulary", "message"),
    [
        (TASKS, 3, 256, "policy.words to at least 4"),
        ((Task("mute", ""),), 3, 256, "give every task a sentence"),
        ((), 3, 256, "no tasks"),
        ((Task("a", "push"), Task("b", "pull")), 3, 2, "choose another size"),
    ],
)
def test_sentences_that_do_not_fit(tasks: tuple[Task, ...], words: int, vocabulary: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        word_table(tasks, words, vocabulary)


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        (TinyVlaSettings(), EnvSpec(STATE, CONTINUOUS, TASKS, 50), "needs the observation 'image' as uint8"),
        (
            TinyVlaSettings(),
            EnvSpec({**PICTURE, "proprio": ArraySpec((4, 4), "float32")}, CONTINUOUS, TASKS, 50),
            "needs the observation 'proprio' as float32",
        ),
        (
            TinyVlaSettings(),
            EnvSpec(
                {"pixels": ArraySpec((96, 96, 3), "uint8"), "agent_pos": ArraySpec((2,), "float32")},
                CONTINUOUS,
                TASKS,
                50,
            ),
            r"rename them \(env\.rename=\{agent_pos: proprio, pixels: image\}\), switch",
        ),
        (
            TinyVlaSettings(),
            EnvSpec({"image": PICTURE["image"], "joints": ArraySpec((7,), "float32")}, CONTINUOUS, TASKS, 50),
            r"rename them \(env\.rename=\{joints: proprio\}\), switch",
        ),
        (
            TinyVlaSettings(),
            EnvSpec(
                {"image": PICTURE["image"], **dict.fromkeys("ab", ArraySpec((7,), "float32"))}, CONTINUOUS, TASKS, 50
            ),
            r"\}: switch it on",
        ),
        (TinyVlaSettings(), EnvSpec(PICTURE, DISCRETE, TASKS, 50), "needs continuous actions"),
        (GaussianSettings(), EnvSpec(STATE, DISCRETE, TASKS, 50), "use policy.type = 'categorical'"),
        (
            GaussianSettings(),
            EnvSpec(STATE, ActionSpec("continuous", 1, (-math.inf,), (1.0,)), TASKS, 50),
            "needs finite action bounds",
        ),
        (CategoricalSettings(), EnvSpec(STATE, CONTINUOUS, TASKS, 50), "needs discrete actions"),
        (CategoricalSettings(), EnvSpec({}, DISCRETE, TASKS, 50), "set policy.progress to true"),
    ],
)
def test_environments_that_do_not_fit(settings: object, spec: EnvSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(settings, spec)


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValidationError, match="does not divide"):
        TinyVlaSettings(heads=5)
    with pytest.raises(ValidationError):
        GaussianSettings(hiden=3)
