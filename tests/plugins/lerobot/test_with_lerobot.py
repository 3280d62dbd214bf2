"""Policies of LeRobot and of a package that it finds, by LeRobot itself: evaluated, and trained where they are flows.

Run in a Python that has lerobot[smolvla], gym-pusht and Polyrhythm: tools/test_all.sh lerobot.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.lerobot.made_folders import make_folder

from polyrhythm.conformance import run_checks
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.lerobot.policies.flow import LerobotFlowSettings
from polyrhythm.plugins.lerobot.policies.folder import LerobotFolders
from polyrhythm.plugins.lerobot.policies.settings import LerobotSettings
from polyrhythm.plugins.trial.policy_contract import policy_checks
from polyrhythm.policies import noise
from polyrhythm.policies.flow_matching import FlowNoise, start_noise
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lerobot") is None,
        reason="needs lerobot beside Polyrhythm: tools/test_all.sh lerobot runs it in a Python that has both",
    ),
    pytest.mark.filterwarnings("ignore"),  # of lerobot's imports
]
_TASKS = ("push the block", "push")
_PACKAGE = Path(__file__).with_name("package")
_OWN = Path(__file__).parents[3] / "src"


def spec(images: bool = True) -> EnvSpec:
    return EnvSpec(
        observation={
            "agent_pos": ArraySpec((2,), "float32"),
            **({"pixels": ArraySpec((96, 96, 3), "uint8")} if images else {}),
        },
        action=ActionSpec("continuous", 2, low=(0.0, 0.0), high=(512.0, 512.0)),
        tasks=tuple(Task(name, name) for name in _TASKS),
        max_steps=10,
    )


def rows(count: int = 4, images: bool = True) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 96, 96, 3), dtype=torch.uint8, generator=draw)
    return {
        "agent_pos": torch.rand(count, 2, generator=draw) * 512,
        **({"pixels": pixels} if images else {}),
        "instruction": torch.arange(count) % len(_TASKS),
        "progress": torch.arange(count) / 10,
    }


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("smolvla"), "smolvla")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with this one's packages and, installed by pip, the package of a policy."""
    place = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "own.pth").write_text(f"{sysconfig.get_path('purelib')}\n{_OWN}")
    source = shutil.copytree(_PACKAGE, place / "package")  # pip builds in it
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(site), str(source)], check=True)
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def drift(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from made_folders import make_folder; "
        "from lerobot.utils.import_utils import register_third_party_plugins; register_third_party_plugins(); "
        "make_folder(Path(sys.argv[2]), 'drift')"
    )
    subprocess.run([str(python), "-c", code, str(Path(__file__).parent), str(folder)], check=True)
    return folder


def policy(folder: Path, images: bool = True, **settings: Any) -> Any:
    made = LerobotFlowSettings(checkpoint=str(folder), steps=3, **settings)
    return made.build(spec(images), seed=0, device="cpu", role="train").eval()


@pytest.mark.parametrize("method", ["flow_sde", FlowNoise()])
def test_smolvla_passes_every_check(smolvla: Path, method: Any) -> None:
    settings = LerobotFlowSettings(checkpoint=str(smolvla), steps=3, method=method)
    checks = policy_checks(settings, rows(), spec(), imitates=True)
    assert [tuple(finding) for finding in run_checks(checks) if finding.state != "ok"] == []


def test_greedy_actions_are_lerobots_own(smolvla: Path) -> None:
    made, obs = policy(smolvla), rows()
    found = made.act(obs, torch.ones(4, dtype=torch.bool), torch.arange(4)).actions
    theirs, (pre, post) = made.network.policy, made.inputs.processors
    theirs.config.num_steps = 3
    start = start_noise(made.shape, noise.content_keys(obs["progress"].unsqueeze(1)))
    image = obs["pixels"].movedim(-1, 1) / 255
    batch = {
        "observation.image": image,
        "observation.state": obs["agent_pos"],
        "task": [_TASKS[i % 2] for i in range(4)],
    }
    wanted = post(theirs.predict_action_chunk(pre(batch), noise=start))[:, :3].clamp(0, 512)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2)


def test_every_trained_tensor_has_a_gradient(smolvla: Path) -> None:
    made, obs = policy(smolvla, value_detach=False), rows()
    act = made.act(obs, torch.zeros(4, dtype=torch.bool), torch.arange(4))
    found = made.evaluate(obs, act.forward_inputs)
    (found.logprob.sum() + found.value.sum()).backward()
    trained = {name: p.grad for name, p in made.named_parameters() if p.requires_grad}
    assert {name.split(".")[3] for name in trained if "network" in name} >= {"vlm_with_expert", "state_proj"}
    assert [name for name, grad in trained.items() if grad is None or not grad.any()] == []
    assert not [name for name in made.published() if ".vlm." in name], "frozen tensors are not published"


def test_a_frozen_prefix_is_computed_once(tmp_path: Path) -> None:
    """Row by row, of prompts of different lengths, and then used together."""
    made, obs = policy(make_folder(tmp_path, "smolvla", train_state_proj=False)), rows()
    kept = [made.precompute({name: x[i : i + 1] for name, x in obs.items()}) for i in range(4)]
    stored = {name: torch.cat([one[name] for one in kept]) for name in kept[0]}
    act = made.act(obs, torch.zeros(4, dtype=torch.bool), torch.arange(4))
    given = {name: obs[name] for name in ("instruction", "progress")} | stored
    found = made.evaluate(given, act.forward_inputs)
    torch.testing.assert_close(found.logprob, act.logprob, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.value, act.value, rtol=0, atol=1e-4)


def test_an_exported_policy_is_lerobots(smolvla: Path, tmp_path: Path) -> None:
    made, obs, greedy = policy(smolvla), rows(), torch.ones(4, dtype=torch.bool)
    with torch.no_grad():
        for tensor in made.published().values():
            tensor.add_(0.01)
    settings = LerobotFlowSettings(checkpoint=str(smolvla))
    weights = {name: x.clone() for name, x in made.published().items()}
    told = LerobotFolders().export(
        settings, weights, tmp_path / "out", base=str(smolvla), source=smolvla, env=(spec(), 0)
    )
    assert told == "network"
    again = policy(tmp_path / "out")
    found, wanted = (one.act(obs, greedy, torch.arange(4)) for one in (again, made))
    torch.testing.assert_close(found.actions, wanted.actions, rtol=0, atol=0)
    torch.testing.assert_close(found.value, wanted.value, rtol=0, atol=0)


def test_a_folder_without_a_tensor_is_refused(smolvla: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(smolvla, tmp_path / "part")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.action_out_proj.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensor model.action_out_proj.bias \(and 0 more\)"):
        policy(folder)


def test_a_policy_without_a_flow_head_is_refused(tmp_path: Path) -> None:
    settings = LerobotFlowSettings(checkpoint=str(make_folder(tmp_path, "act")))
    with pytest.raises(ConfigError, match="cannot use a 'act': it regresses actions"):
        settings.form(spec())


@pytest.mark.parametrize("kind", ["act", "smolvla"])
def test_lerobots_own_are_evaluated(tmp_path: Path, kind: str) -> None:
    settings = LerobotSettings(checkpoint=str(make_folder(tmp_path, kind)), python=sys.executable)
    found = settings.build(spec(), seed=0, device="cpu", role="act")
    actions = found.act(rows(), torch.zeros(4, dtype=torch.bool), torch.arange(4)).actions
    assert actions.shape == (4, 3, 2)
    assert actions.isfinite().all()


def test_a_policy_of_a_package_is_evaluated(python: Path, drift: Path) -> None:
    settings = LerobotSettings(checkpoint=str(drift), python=str(python))
    found = settings.build(spec(images=False), seed=0, device="cpu", role="act")
    actions = found.act(rows(images=False), torch.zeros(4, dtype=torch.bool), torch.arange(4)).actions
    assert actions.shape == (4, 3, 2)
    assert actions.std() > 0


def test_a_policy_of_a_package_passes_every_check(python: Path, drift: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(next(python.parents[1].glob("lib/python*/site-packages")))
    settings = LerobotFlowSettings(checkpoint=str(drift), steps=3)
    checks = policy_checks(settings, rows(images=False), spec(images=False), imitates=True)
    assert [tuple(finding) for finding in run_checks(checks) if finding.state != "ok"] == []


def test_a_missing_package_is_named(drift: Path) -> None:
    settings = LerobotSettings(checkpoint=str(drift), python=sys.executable)
    found = settings.build(spec(images=False), seed=0, device="cpu", role="act")
    with pytest.raises(ConfigError, match="no policy of type 'drift' is registered; install its package, whose name"):
        found.act(rows(images=False), torch.zeros(4, dtype=torch.bool), torch.arange(4))


@pytest.mark.parametrize("kind", ["smolvla", "drift"])
def test_it_is_trained(kind: str, python: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two updates on PushT; without lag, recomputed log-probs are those of acting with the weights of the update."""
    pixels = "pixels_agent_pos" if kind == "smolvla" else "environment_state_agent_pos"
    env = {"type": "gymnasium", "id": "gym_pusht:gym_pusht/PushT-v0", "kwargs": {"obs_type": pixels}, "max_steps": 6}
    recipe = {
        "env": env,
        "policy": {"type": "lerobot_flow", "checkpoint": str(request.getfixturevalue(kind)), "steps": 2},
        "rollout": {"rows": 2},
        "freshness": {"max_lag": 0},
        "training": {
            "versions": 2,
            "mini_batch_samples": 4,
            "epochs": 1,
            "minibatch_steps": 4,
            "micro_batch_steps": 4,
            "optimizer": {"lr": 1e-3},
        },
        "evaluation": {"episodes": 2},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [str(python), "-m", "polyrhythm", "train", str(tmp_path / "recipe.yaml"), f"out_dir={tmp_path / 'runs'}"]
    subprocess.run(command, check=True, timeout=1500, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    (metrics,) = (tmp_path / "runs").glob("*/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [line for line in lines if "train/actor/grad_norm" in line]
    assert [line["train/actor/current_version"] for line in updates] == [0, 1]
    assert all(line["train/actor/grad_norm"] > 0 for line in updates)
    for line in updates:
        assert line["train/actor/proximal_approx_kl"] > 1e-6, "its steps change the policy"
        assert abs(line["train/actor/behav_approx_kl"]) < 1e-9, "the generator acted with the trainer's weights"
