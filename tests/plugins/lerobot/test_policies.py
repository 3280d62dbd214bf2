"""A policy of LeRobot in a process of its own, with a stand-in for the package lerobot behind the real boundary."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import long

from polyrhythm.checks import CheckContext
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.lerobot.policies.checks import check_use
from polyrhythm.plugins.lerobot.policies.settings import LerobotProcess, LerobotSettings
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

#: A package with the functions of lerobot that the process calls; its policy returns what it was given.
_STAND_IN = {
    "__init__.py": "__version__ = '0'",
    "configs/__init__.py": "",
    "configs/policies.py": """
import json, os, pathlib, tempfile
class PreTrainedConfig:
    @classmethod
    def get_known_choices(cls):
        return {"act", "diffusion"}
    @classmethod
    def from_pretrained(cls, folder, local_files_only):
        os.close(tempfile.mkstemp(suffix=".json")[0])  # as LeRobot's own leaves it
        config = cls()
        vars(config).update(json.loads((pathlib.Path(folder) / "config.json").read_text()))
        return config
""",
    "policies/__init__.py": "",
    "policies/factory.py": """
import os, pathlib, subprocess, time, torch
class Policy(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
    @classmethod
    def from_pretrained(cls, folder, config, local_files_only):
        return cls(config)
    def reset(self):
        pass
    def predict_action_chunk(self, batch):
        state, image = batch["observation.state"], batch["observation.image"]
        if batch["task"] == ["leave"]:
            os._exit(7)
        if batch["task"][0].startswith("hang"):
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path(batch["task"][0][5:]).write_text(str(child.pid))
            time.sleep(600)
        first = state.flatten(1)[:, :2] + image.flatten(1).mean(1, keepdim=True)
        if self.config.type == "diffusion":
            first = first + torch.rand_like(first)
        return first.unsqueeze(1) + torch.arange(4.0).view(1, 4, 1)
def get_policy_class(kind):
    return Policy
def make_pre_post_processors(config, pretrained_path, **overrides):
    return (lambda batch: batch), (lambda actions: actions / 10)
""",
}


def spec(frames: int = 1, **changes: Any) -> EnvSpec:
    lead = (frames,) if frames > 1 else ()
    values: dict[str, Any] = {
        "observation": {
            "pixels": ArraySpec((*lead, 6, 5, 3), "uint8"),
            "agent_pos": ArraySpec((*lead, 2), "float32"),
            "unused": ArraySpec((9,), "float32"),
        },
        "action": ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0)),
        "tasks": (Task("push", "push"), Task("leave", "leave")),
        "max_steps": 10,
    }
    return EnvSpec(**{**values, **changes})


def write_policy(folder: Path, kind: str = "act", frames: int = 1, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    config = {
        "type": kind,
        "n_obs_steps": frames,
        "n_action_steps": 3,
        "chunk_size": 4,
        "input_features": {
            "observation.image": {"type": "VISUAL", "shape": [3, 6, 5]},
            "observation.state": {"type": "STATE", "shape": [2]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python of its own: a virtual environment that has the stand-in, and this one's torch and numpy."""
    place = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "own.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    for name, text in _STAND_IN.items():
        file = site / "lerobot" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(place)


def rows(found: EnvSpec, tasks: list[int]) -> dict[str, torch.Tensor]:
    count = len(tasks)
    arrays = {
        name: torch.arange(count * int(np.prod(one.shape))).view(count, *one.shape).to(getattr(torch, one.dtype))
        for name, one in found.observation.items()
    }
    arrays["agent_pos"] = arrays["agent_pos"] / 10
    arrays["pixels"] = torch.full_like(arrays["pixels"], 51)
    return {**arrays, "instruction": torch.tensor(tasks), "progress": torch.zeros(count)}


def act(policy: Any, obs: dict[str, torch.Tensor], greedy: bool = True, key: int = 0) -> torch.Tensor:
    count = len(obs["progress"])
    keys = torch.arange(key, key + count)
    found: torch.Tensor = policy.act(obs, torch.full((count,), greedy), keys).actions
    return found


@pytest.mark.parametrize("frames", [1, pytest.param(2, marks=long(2, "two frames"))])
def test_actions_come_from_the_other_python(tmp_path: Path, python: str, frames: int) -> None:
    folder = write_policy(tmp_path / "policy", frames=frames)
    settings = LerobotSettings(checkpoint=str(folder), python=python)
    form = settings.form(spec(frames))
    assert (form.chunk, form.action_dim, form.traits.value) == (3, 2, False)
    policy = settings.build(spec(frames), seed=0, device="cpu", role="act")
    obs = rows(spec(frames), [0, 0])
    state = obs["agent_pos"].flatten(1)[:, :2]
    expected = (state.unsqueeze(1) + 0.2 + torch.arange(3.0).view(1, 3, 1)) / 10
    torch.testing.assert_close(act(policy, obs), expected)


def test_a_rows_noise_is_its_own(tmp_path: Path, python: str) -> None:
    settings = LerobotSettings(checkpoint=str(write_policy(tmp_path / "policy", "diffusion")), python=python, chunk=2)
    policy = settings.build(spec(), seed=0, device="cpu", role="act")
    obs = rows(spec(), [0, 0, 0])
    one = {name: x[1:2] for name, x in obs.items()}
    both = act(policy, obs, greedy=False)
    assert both.shape == (3, 2, 2)
    torch.testing.assert_close(act(policy, one, greedy=False, key=1), both[1:2], rtol=0, atol=0)
    assert not torch.equal(act(policy, one, greedy=False, key=2), both[1:2])
    assert torch.equal(act(policy, obs, key=5), act(policy, obs, key=9)), "greedy rows do not read their keys"


def test_a_process_that_fails_is_one_sentence(tmp_path: Path, python: str) -> None:
    unknown = LerobotSettings(checkpoint=str(write_policy(tmp_path / "unknown", "unknown")), python=python)
    with pytest.raises(
        ConfigError, match="LeRobot refuses: ValueError: no policy of type 'unknown' is registered; install"
    ):
        LerobotProcess(unknown, "cpu")
    settings = LerobotSettings(checkpoint=str(write_policy(tmp_path / "policy")), python=python)
    policy = settings.build(spec(), seed=0, device="cpu", role="act")
    with pytest.raises(ConfigError, match="the process of LeRobot ended with status 7"):
        act(policy, rows(spec(), [1]))


def _left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("end", ["closed", "killed", "orphaned"])
def test_nothing_is_left_of_the_process(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    settings = LerobotSettings(checkpoint=str(write_policy(tmp_path / "policy")), python=python)
    process = LerobotProcess(settings, "cpu")
    assert len(_left(temporary)) == 1, "the stand-in leaves a file, as LeRobot does"
    if end == "orphaned":  # as if this process had been killed: nothing but the connection ends
        process._socket.shutdown(socket.SHUT_RDWR)
        process._process.wait(30)
        assert not any(temporary.iterdir())
    elif end == "killed":
        process._process.kill()
    process.close()
    assert not any(temporary.iterdir())


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=long(10, "a process that hangs")) for size in (1, 4_000_000)]
)
def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path, python: str, size: int) -> None:
    settings = LerobotSettings(checkpoint=str(write_policy(tmp_path / "policy")), python=python)
    process, child = LerobotProcess(settings, "cpu", call_s=4.0), tmp_path / "child"
    obs = {"observation.state": np.zeros((1, 2), np.float32), "observation.image": np.zeros((1, size), np.float32)}
    with pytest.raises(ConfigError, match="its process did not answer in 4 s"):
        process.act(obs, [f"hang {child}"], [0])
    status, until = Path(f"/proc/{child.read_text()}/stat"), time.monotonic() + 20
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="was ended by SIGKILL"):
        process.act(obs, ["push"], [0])


@pytest.mark.parametrize(
    ("changes", "of", "said"),
    [
        ({"output_features": {"action": {"shape": [7]}}}, {}, "its actions have 7 numbers"),
        ({"output_features": {}}, {}, "config.json is not of a policy of LeRobot"),
        ({"n_obs_steps": 2}, {}, "FrameStackObservation"),
        ({"n_action_steps": 1}, {}, "policy.chunk = 2: the checkpoint executes at most 1"),
        ({"input_features": {"observation.wrist": {"type": "VISUAL", "shape": [3, 6, 5]}}}, {}, "observation.wrist"),
        ({}, {"keys": {"camera": "observation.image"}}, "no array camera"),
        ({}, {"keys": {"unused": "observation.state"}}, r"needs float32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], of: dict[str, Any], said: str
) -> None:
    settings = LerobotSettings(checkpoint=str(write_policy(tmp_path / "policy", **changes)), chunk=2, **of)
    with pytest.raises(ConfigError, match=said):
        settings.form(spec())


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json", "config.json"])
def test_a_folder_without_its_processors_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_policy(tmp_path / "policy")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"it has no {name}"):
        LerobotSettings(checkpoint=str(folder)).form(spec())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("act", "no likelihood; train it with lerobot-train"),
        ("diffusion", r"\(DPPO\) is not built here"),
        ("smolvla", "policy.type=lerobot_flow, or"),
        ("pi0", "policy.type=pi0"),
        ("of_a_package", "if its class has flow_prefix"),
    ],
)
def test_training_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    folder = write_policy(tmp_path / "policy", kind)
    recipe = {"env": "gymnasium:CartPole-v1", "policy": {"type": "lerobot", "checkpoint": str(folder)}}
    training = {"training": {"versions": 1, "mini_batch_samples": 8}, "evaluation": {"episodes": 8}}
    with pytest.raises(ConfigError, match=why):
        check_use(CheckContext(load_config({**recipe, **training})))
    config = load_config({**recipe, **training}, [{"training.versions": 0}])
    with pytest.raises(MissingError, match="this Python has no lerobot; make one: polyrhythm envs setup"):
        check_use(CheckContext(config))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("act", "it regresses actions, so it has no likelihood; train it with lerobot-train, or evaluate it"),
        ("diffusion", r"\(DPPO\) is not built here; train it with lerobot-train"),
        ("pi05", "its network is built here; use policy.type=pi05"),
    ],
)
def test_a_policy_without_a_flow_head_is_not_trained(tmp_path: Path, kind: str, why: str) -> None:
    policy = {"type": "lerobot_flow", "checkpoint": str(write_policy(tmp_path / "policy", kind))}
    recipe = {"env": "gymnasium:CartPole-v1", "policy": policy, "evaluation": {"episodes": 8}}
    training = {"versions": 1, "mini_batch_samples": 8}
    with pytest.raises(ConfigError, match=f"policy.type = lerobot_flow cannot use a '{kind}': .*{why}"):
        check_use(CheckContext(load_config({**recipe, "training": training})))


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="this Python has lerobot")
def test_a_flow_policy_asks_for_its_python(tmp_path: Path) -> None:
    policy = {"type": "lerobot_flow", "checkpoint": str(write_policy(tmp_path / "policy", "smolvla"))}
    training = {"versions": 1, "mini_batch_samples": 8}
    config = load_config({"env": "gymnasium:CartPole-v1", "policy": policy, "training": training})
    with pytest.raises(MissingError, match="this Python has no lerobot; install Polyrhythm in one that has"):
        check_use(CheckContext(config))
