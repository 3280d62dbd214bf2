"""A trained policy without stations: the same actions as in an evaluation, and one sentence for what does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.built import built
from tests.pipeline.runs import config
from torch import Tensor

import polyrhythm
from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.trained_policy import StandalonePolicy, load_standalone
from polyrhythm.policies.base import Act, Observations
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.policies.tiny_vla.policy import TinyVlaSettings
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.specs.hashing import library_seed

SPEC = EnvSpec(
    observation={"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((4,), "float32")},
    action=ActionSpec("continuous", 3, low=(-1.0,) * 3, high=(1.0, 1.0, 2.0)),
    tasks=(Task("door-close", "close the door"), Task("push", "push the button")),
    max_steps=40,
)


def _saved(path: Path, run: RunConfig) -> Path:
    spec = run.env.spec()  # type: ignore[attr-defined]
    policy = built(run.policy, spec, 7)  # type: ignore[attr-defined]
    save_policy(policy.state_dict(), run, path, 5, spec)
    return path


def _vla() -> StandalonePolicy:
    return StandalonePolicy(built(TinyVlaSettings(width=16, layers=1, heads=2), SPEC), SPEC, 1, 0)


def _obs(*rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (*rows, 16, 16, 3), np.uint8)
    return {"image": image, "proprio": rng.normal(size=(*rows, 4)).astype(np.float32)}


def test_in_a_plain_loop_it_earns_what_the_evaluation_does(tmp_path: Path) -> None:
    file = _saved(tmp_path / "policy.pt", config())
    policy = load_standalone(file)
    returns = []
    for episode in held_out(4, 3, 1, greedy=True):
        env = gymnasium.make("CartPole-v1", max_episode_steps=policy.spec.max_steps)
        state, _ = env.reset(seed=library_seed(episode.seed))
        earned, over = 0.0, False
        while not over:
            action = policy.act({"state": state})
            assert action.shape == (1, 1)
            state, reward, ended, cut, _ = env.step(int(action[0, 0]))
            earned, over = earned + float(reward), ended or cut
        returns.append(earned)
    assert evaluate(file, 4, 3)["mean_return"] == np.mean(returns)
    assert policy.version == 5


def test_rows_instructions_and_progress_reach_the_policy() -> None:
    policy = _vla()
    assert policy.reads_instruction
    assert policy.reads_progress
    batch = _obs(3)
    actions = policy.act(batch, ["close the door", "push", "Push the button!"], step=[0, 5, 99])
    assert actions.shape == (3, 2, 3)
    assert actions.dtype == np.float32
    for row, told in enumerate(("door-close", "push the button", "push the button")):
        one = {name: array[row] for name, array in batch.items()}
        np.testing.assert_allclose(policy.act(one, told, step=0), actions[row], atol=1e-5)
    same = {name: np.stack([array[0]] * 2) for name, array in batch.items()}
    shown = policy.act(same, ["close the door", "push the button"], step=0)
    assert not np.array_equal(shown[0], shown[1])


class Asking(GaussianPolicy):
    """Looks for observations that there may not be."""

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        assert "mask" not in obs
        assert obs.get("goal") is None
        return super().act(obs, greedy, noise_key)


def test_a_policy_may_ask_for_what_is_not_there() -> None:
    spec = EnvSpec({"state": ArraySpec((2,), "float32")}, SPEC.action, SPEC.tasks, 40)
    policy = StandalonePolicy(Asking(GaussianSettings(hidden=8), spec), spec, 1, 0)
    assert policy.act({"state": np.zeros(2, np.float32)}, "push", step=0).shape[1] == 3


def test_noise_without_a_step_is_refused_as_it_would_be_the_same_each_time(tmp_path: Path) -> None:
    policy = load_standalone(_saved(tmp_path / "policy.pt", config()))
    assert not policy.reads_progress
    with pytest.raises(ValueError, match="seed = 1: without step the noise would be the same in every call; give"):
        policy.act({"state": np.zeros(4, np.float32)}, seed=1)
    assert policy.act({"state": np.zeros(4, np.float32)}, seed=1, step=0).shape == (1, 1)


def test_noise_is_a_function_of_seed_step_and_row() -> None:
    policy, obs = _vla(), _obs(2)
    first = policy.act(obs, "push", step=3, seed=1)
    assert np.array_equal(first, policy.act(obs, "push", step=3, seed=1))
    assert not np.array_equal(first, policy.act(obs, "push", step=4, seed=1))
    assert not np.array_equal(first, policy.act(obs, "push", step=3, seed=2))
    assert not np.array_equal(first, policy.act(obs, "push", step=3))


@pytest.mark.parametrize(
    ("obs", "instruction", "step", "said"),
    [
        ({"image": _obs()["image"]}, "push", 0, "obs: proprio is missing; give image, proprio"),
        ({**_obs(), "image": np.zeros((16, 16, 3))}, "push", 0, "is float64: the policy needs uint8"),
        ({**_obs(), "image": np.zeros((8, 8, 3), np.uint8)}, "push", 0, "needs \\[16, 16, 3\\], or rows of that"),
        ({**_obs(), "image": np.full((16, 16, 3), 256, np.uint16)}, "push", 0, "has values beyond uint8"),
        ({**_obs(), "proprio": [np.nan, 0.0, 0.0, 0.0]}, "push", 0, "has NaN or inf"),
        ({**_obs(2), "proprio": np.zeros((3, 4), np.float32)}, "push", 0, "different numbers of rows \\(image 2, prop"),
        (_obs(), None, 0, "instruction = None: this policy needs one; it knows 'close the door', 'push the button'"),
        (_obs(), "close the dor", 0, "did you mean close the door"),
        (_obs(2), ["push"], 0, "1 sentences for 2 rows"),
        (_obs(), "push", None, "step = None: this policy uses the progress"),
        (_obs(), "push", -1, "step = -1: it must be"),
        (_obs(), "push", 0.5, "step = 0.5: it must be"),
    ],
)
def test_what_does_not_fit_is_one_sentence(obs: Any, instruction: Any, step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        _vla().act(obs, instruction, step=step)
    assert "\n" not in str(refused.value)


def test_the_file_is_enough_where_the_environment_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's module is gone; and a file of before, which does not say its spec, wants it."""
    program = """
import sys
from pathlib import Path
import numpy as np
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.trained_policy import load_standalone
policy = load_standalone(Path(sys.argv[1]))
print(policy.act({"position": np.zeros(2), "goal": np.ones(2)}).shape, {"mujoco", "point"} & set(sys.modules))
try:
    load_standalone(Path(sys.argv[2]))
except ConfigError as error:
    print(error)
"""
    (tmp_path / "point.py").write_text((Path(__file__).parents[2] / "examples/own_env/point.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    training = {"versions": 1, "mini_batch_samples": 4, "minibatch_steps": 4}
    run = validate({"name": "p", "env": {"type": "point:PointSettings"}, "policy": "gaussian", "training": training})
    monkeypatch.delitem(sys.modules, "point")
    spec = run.env.spec()  # type: ignore[attr-defined]
    weights = built(run.policy, spec).state_dict()  # type: ignore[attr-defined]
    save_policy(weights, run, tmp_path / "with.pt", 0, spec)
    save_policy(weights, run, tmp_path / "without.pt", 0)
    (tmp_path / "point.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", program, "with.pt", "without.pt"],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(polyrhythm.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == "(1, 2) set()"
    assert "point:PointSettings cannot be imported" in told[1]
