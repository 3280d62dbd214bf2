"""`polyrhythm train RECIPE --check`: ready, missing or wrong, and nothing is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import psutil
import pytest
from tests.envs.broken_envs import WalkSettings
from tests.plugins.pretrained.released import write_hollow_folder
from tests.plugins.pretrained.small_tokenizer import write_tokenizer

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, save_config
from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import check_form
from polyrhythm.plugins.memory_estimate import room
from polyrhythm.plugins.memory_estimate.room import check_room
from polyrhythm.plugins.vla.released import architecture
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.training.checkpoint import save_state

WALK = "env={type: 'tests.envs.broken_envs:WalkSettings', defect: '%s'}"


class AbsentSettings(WalkSettings):
    """An environment whose package is not there; without it, it cannot tell its spec."""

    needs: ClassVar = ("no_such_simulator",)
    type: Literal["tests.cli.test_train_check:AbsentSettings"] = "tests.cli.test_train_check:AbsentSettings"
    defect: str = "spec raises"


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> dict[str, Any]:
    """What the check says as JSON, with its findings by name."""
    assert main(["train", *words, "--check", "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ready"] == (status == 0)
    return found | {"by_name": {check["name"]: check for check in found["checks"]}}


def test_a_recipe_that_is_ready_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "cartpole", "--check", "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("ready to train; nothing was started\n")
    assert len(said.splitlines()) < 12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("defect", ["reset raises", "step raises", "rows"])
def test_no_simulator_is_started(defect: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["latency", "launcher=inline", WALK % defect, "policy=gaussian"]
    told(capsys, *words, status=0)
    assert main(["check", *words]) == 1, "the environment is broken, and only running it tells"


def test_a_dataset_that_is_not_there_is_missing_and_another_folder_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["quickstart", "demonstrations.dataset.only_success=false"]
    found = told(capsys, *words, f"demonstrations.dataset.folder={tmp_path / 'none'}", status=3)
    assert found["missing"] == [f"{tmp_path / 'none'} is not there"]
    found = told(capsys, *words, f"demonstrations.dataset.folder={tmp_path}", status=1)
    assert found["failed"] == [f"{tmp_path} has no meta/info.json: it is not a LeRobot dataset"]
    words += [f"demonstrations.dataset.folder={tmp_path}", "demonstrations.dataset.format=lerobto"]
    (wrong,) = told(capsys, *words, status=1)["failed"]
    assert wrong == "demonstrations.dataset.format = lerobto: there is no such layout"


def test_the_recipe_of_a_released_policy_lacks_its_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "metaworld_pi0", "policy.checkpoint=/no/such/folder", status=3)
    assert found["failed"] == []
    missing = found["missing"]
    assert any(text.startswith("checkpoint = /no/such/folder: there is no such folder") for text in missing)
    assert any(text.startswith("policy.tokenizer = checkpoints/paligemma") for text in missing)
    of_the_machine = (
        "placement",
        "env.type = metaworld: the package",
        "rendering",
    )
    others = [text for text in missing if not text.startswith(("checkpoint", "policy.tokenizer"))]
    assert all(text.startswith(of_the_machine) for text in others)
    policy = found["by_name"]["policy"]["detail"]
    assert policy == "chunk of 5 actions of 4 entries", "its size is unknown without its folder"
    memory = found["by_name"]["memory by station"]
    assert memory["state"] == "note"
    assert "its size is unknown" in memory["detail"]
    assert not any("GB" in text for text in missing)
    assert all(check["fix"] for check in found["checks"] if check["state"] == "missing")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full-size π0 of which the files have headers and no content, with its statistics and no tokenizer."""
    folder = tmp_path_factory.mktemp("pi0")
    of = architecture("pi0")
    with weights_on_meta():
        network = of.network(of.size({}, {}))
    write_hollow_folder(folder, {name: x.shape for name, x in network.state_dict().items()}, shards=2)
    numbers = {name: [0.0] * 4 for name in ("mean", "q01")} | {name: [1.0] * 4 for name in ("std", "q99")}
    assets = folder / "assets" / "metaworld"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": numbers, "actions": numbers}}))
    return folder


def test_a_released_folder_is_compared_by_its_headers(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["metaworld_pi0", f"policy.checkpoint={released}", "policy.tokenizer=''"]
    found = told(capsys, *words, status=3)
    assert any(text.startswith(f"checkpoint = {released}: it has no tokenizer") for text in found["missing"])
    policy = found["by_name"]["policy"]["detail"]
    assert policy.startswith("chunk of 5 actions of 4 entries; 3,501,975,313 parameters")

    words[-1] = f"policy.tokenizer={write_tokenizer(tmp_path / 'tokenizer')}"
    assert not any("tokenizer" in text for text in told(capsys, *words, status=_status(capsys, words))["missing"])
    (wrong,) = told(capsys, *words, "policy.type=pi05", "policy.checkpoint=" + str(released), status=1)["failed"]
    assert wrong.startswith("policy.type = 'pi05', but checkpoint = ")
    (wrong,) = told(capsys, *words, "policy.robot=bridge", status=1)["failed"]
    assert wrong.startswith("policy.robot = 'bridge': checkpoint = ")

    shard = released / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / shard.name)
    try:
        found = told(capsys, *words, status=3)
    finally:
        (tmp_path / shard.name).rename(shard)
    assert any("1 of the 2 files that model.safetensors.index.json names are missing" in x for x in found["missing"])
    assert not any("GB" in text for text in found["missing"])


def test_a_tokenizer_that_is_missing_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart_pi0", "launcher=inline", "policy.checkpoint=null"]
    whole = told(capsys, *words, status=0)["by_name"]["policy"]["detail"]
    found = told(capsys, *words, "policy.tokenizer=/no", status=3)
    assert found["missing"] == ["policy.tokenizer = /no: there is no such folder"]
    assert found["by_name"]["policy"]["detail"] == whole, "the run's own size"


def _status(capsys: pytest.CaptureFixture[str], words: list[str]) -> int:
    """0, or 3 on a machine without a GPU or the memory."""
    status = main(["train", *words, "--check"])
    capsys.readouterr()
    assert status in (0, 3)
    return status


@pytest.mark.parametrize(
    ("words", "name", "said"),
    [
        (["policy.method=ode"], "objective", "its log-probs do not depend on its parameters"),
        (["policy.checkpoint=/no", "policy.method=ode"], "objective", "its log-probs do not depend on its parameters"),
        (["policy.size=released", "policy.chunk=9", "policy.horizon=5"], "policy", "the network predicts 5 actions"),
        (["policy.checkpoint=/no", "policy.state=joints"], "policy", "policy.state = 'joints'"),
        (
            ["policy.checkpoint=/no", "training.optimizer.groups=[{match: [tower.*], lr: 1.0e-3}]"],
            "objective",
            "training.optimizer.groups.0.match = tower.*",
        ),
        (["policy.checkpoint=/no", "algorithm.reward_level=action"], "objective", "gives one value per chunk"),
        (["evaluation.swapped=true", "env.tasks=[reach-v3]"], "first weights", "it takes at least 2 tasks"),
    ],
)
def test_what_is_wrong_is_told_even_where_the_folder_is_missing(
    words: list[str], name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "quickstart_pi0", "launcher=inline", *words, status=1)
    (wrong,) = [check for check in found["checks"] if check["state"] == "failed"]
    assert wrong["name"] == name
    assert said in wrong["detail"]
    assert wrong["fix"]


def test_a_package_that_is_missing_is_no_fault_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    env = "env={type: 'tests.cli.test_train_check:AbsentSettings'}"
    found = told(capsys, "latency", "launcher=inline", env, "policy=gaussian", status=3)
    assert "no_such_simulator is not installed" in found["missing"][0]
    assert found["by_name"]["environment"]["detail"].startswith("not checked without no_such_simulator")
    found = told(capsys, "latency", "launcher=inline", WALK % "spec raises", "policy=gaussian", status=1)
    assert found["failed"] != []


def test_peft_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    found = told(capsys, "quickstart_pi0", "launcher=inline", "policy.train=lora", status=3)
    (missing,) = found["missing"]
    assert missing.startswith("policy.train = lora needs peft")


def test_first_weights_that_are_missing_and_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "cartpole", "launcher=inline", f"init_from={tmp_path / 'none'}", status=3)
    assert found["missing"] == [f"init_from = {tmp_path / 'none'}: it does not exist"]
    found = told(capsys, "cartpole", "launcher=inline", f"init_from={tmp_path}", status=1)
    assert found["by_name"]["first weights"]["state"] == "failed"


def test_first_weights_of_another_policy_are_told_without_building_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["quickstart_pi0", "launcher=inline"]
    config = load_config(words[0], words[1:])
    save_config(config, tmp_path / "config.yaml")
    words += [f"init_from={tmp_path}", "policy.checkpoint=/no/merged"]
    assert "holds no policy.pt" in told(capsys, *words, status=1)["failed"][0]
    save_state({"policy": {}, "config": config.model_dump(mode="json"), "version": 1}, tmp_path / "policy.pt")
    for file in (tmp_path, tmp_path / "policy.pt"):
        found = told(capsys, *words[:2], f"init_from={file}", words[-1], status=1)["failed"]
        assert found == [
            f'init_from = {file}: policy.checkpoint is /no/merged here but "" in the policy of those weights'
        ]
    # So much memory that nothing needs to be estimated, which takes long at this size.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**13, total=10**13))
    monkeypatch.setattr(room, "container_limit", lambda: None)
    large = ["policy.size=released"]
    config = load_config(words[0], [*words[1:2], *large])
    save_config(config, tmp_path / "config.yaml")
    found = told(capsys, *words[:3], *large, status=_status(capsys, words[:3] + large))
    assert found["by_name"]["first weights"]["detail"] == f"init_from = {tmp_path}"


def test_a_device_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "cartpole", "placement.trainer.devices=99", status=3)
    assert found["missing"][0].startswith("placement.trainer.devices = 99: torch sees")
    words = ["placement.trainer.devices=99", "placement.simulators.devices=0", "launcher=inline"]
    assert told(capsys, "cartpole", *words, status=1)["failed"], "an inline run has no process to bind"


def test_a_wrong_key_is_an_error_before_any_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cartpole", "--check", "rollout.row=3"]) == 2
    assert "rollout.row" in capsys.readouterr().err


def test_the_conclusion_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart_pi0", "launcher=inline", "policy.checkpoint=/no", "--check"]) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith("missing (?); all else is in order")
    words = ["train", "quickstart_pi0", "launcher=inline", "policy.checkpoint=/no", "policy.method=ode", "--check"]
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 wrong (✗), ")


def test_memory_that_is_too_small_is_one_sentence_with_both_numbers() -> None:
    config = load_config("quickstart_pi0", ["policy.size=released", "policy.dtype=bfloat16", "policy.train=expert"])
    spec = env_settings(config).spec()
    form = check_form(config, spec)
    with pytest.raises(
        StartError, match=r"at least 18\.\d GB .* \(generator-0 7\.0 GB, trainer 11\.\d GB\), 18\.0 GB are"
    ):
        check_room(config, spec, form, free=lambda device: 18 * 10**9)
    check_room(config, spec, form, free=lambda device: 19 * 10**9)


def sums(folder: Path, answer: str, name: str = "sums.jsonl") -> list[str]:
    """The recipe of examples/prompts with a file of its own, in which all answers begin with these words."""
    rows = [{"question": f"{i}+{i}=", "answer": f"{answer}{2 * i}"} for i in range(40)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Path(__file__).parents[2] / "examples" / "prompts" / "sums.yaml"
    return [str(recipe), f"env.files={folder / name}"]


def test_answers_that_the_expert_cannot_write_are_found_for_every_verifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = "env.verify={type: regex, pattern: '[0-9]+'}"
    words = [*sums(tmp_path, "it is "), digits]
    found = told(capsys, *words, status=1)
    (failed,) = (check for check in found["checks"] if check["state"] == "failed")
    assert failed["detail"] == "env.max_new_tokens = 4: the expert's message has 9 tokens with its end"
    assert failed["fix"].startswith("raise it to 9,")
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 2
    assert "raise it to 9," in capsys.readouterr().err
    assert main(["sft", *words, "--out", str(tmp_path / "run")]) == 2
    assert "raise it to 9," in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    told(capsys, *words, "env.max_new_tokens=9", status=0)
    told(capsys, *words, "demonstrations=null", "supervised=null", status=0)
    (tmp_path / "first").mkdir()
    found = told(capsys, *sums(tmp_path / "first", "it is "), "demonstrations=null", "supervised=null", status=1)
    (failed,) = (check for check in found["checks"] if check["state"] == "failed")
    assert failed["fix"] == "raise env.max_new_tokens to 9"


def test_what_is_wrong_with_the_data_is_told_once_and_under_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sums.jsonl"
    recipe, right = sums(tmp_path, ""), file.read_text()
    for content, words, status in (
        ("{broken", [], 1),
        ("", [], 1),
        (None, [], 3),
        (right, ["env.verify={type: regex, pattern: x, message: y}"], 1),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        found = told(capsys, *recipe, *words, status=status)
        (one,) = (check for check in found["checks"] if check["state"] in ("failed", "missing"))
        assert one["name"] == "environment"
        assert one["fix"]
        assert "environment's packages" not in found["by_name"]
        assert ("not checked" in found["by_name"]["policy"]["detail"]) == (not words)
