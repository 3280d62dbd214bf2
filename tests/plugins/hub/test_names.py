"""Names hf://, against a hub on loopback, with the real client."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tests.long import long
from tests.plugins.hub.local_hub import TOKEN, LocalHub
from tests.plugins.hub.test_card import write_run

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.hub import files as hub_files
from polyrhythm.sources import fetch, fetched_folder, local_folder, names, pinned, pinning_once

pytest.importorskip("huggingface_hub", reason="needs the extra hub")

REPO = "models/acme/arm"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 500,
    "assets/arm/norm_stats.json": b"{ }",
    "optimizer.pt": b"moments",
    "README.md": b"card",
    "original/model.safetensors": b"twice",
}
WANTED = ["assets/arm/norm_stats.json", "config.json", "model.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    hub = LocalHub()
    hub.commit(REPO, FILES)
    with hub.served() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:  # nobody listens on its port afterwards
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def recipe(name: str) -> dict[str, Any]:
    return {"policy": {"type": "pi0", "checkpoint": name}}


def test_a_branch_becomes_its_commit(hub: LocalHub) -> None:
    first = hub.branches[REPO]["main"]
    found = pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"]
    assert found == f"hf://acme/arm@{first}"
    hub.commit(REPO, {"model.safetensors": b"newer"})
    asked = len(hub.requests)
    assert pinned(recipe(found))["policy"]["checkpoint"] == found
    assert len(hub.requests) == asked, "a commit needs no question"
    assert (fetched_folder(found) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_block_reads_each_revision_once(hub: LocalHub) -> None:
    first = hub.branches[REPO]["main"]
    with pinning_once():
        for words in ([], ["policy.chunk=2"]):
            config = load_config("metaworld_pi0", ["policy.checkpoint=hf://acme/arm", *words])
            assert names(config) == {"policy.checkpoint": f"hf://acme/arm@{first}"}
            hub.commit(REPO, {"model.safetensors": f"newer {words}".encode()})
        assert len(hub.requests) == 1
    assert pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"] != f"hf://acme/arm@{first}"


@pytest.mark.parametrize("section", [{"policy": {"checkpoint": "here"}}, {"policy": "gaussian"}, {}])
def test_other_settings_stay(section: dict[str, Any], hub: LocalHub) -> None:
    assert pinned(section) == section
    assert not hub.requests


def test_needed_files_are_downloaded_once(hub: LocalHub) -> None:
    name = pinned(recipe("hf://acme/arm@main"))["policy"]["checkpoint"]
    with pytest.raises(MissingError, match=r"hf download acme/arm --revision [0-9a-f]{40} --include '\*"):
        local_folder(name)
    folder = fetched_folder(name)
    assert hub.downloads() == WANTED
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == WANTED
    asked = len(hub.requests)
    assert local_folder(name) == fetched_folder(name) == folder
    assert len(hub.requests) == asked


def test_what_is_cached_serves_without_a_hub(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched_folder("hf://acme/arm")
    disconnect(monkeypatch)
    name = pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"]
    assert name == f"hf://acme/arm@{hub.branches[REPO]['main']}"
    assert (fetched_folder(name) / "config.json").is_file()


def test_offline_the_command_is_named(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    disconnect(monkeypatch)
    assert pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"] == "hf://acme/arm"
    with pytest.raises(MissingError) as refusal:
        fetched_folder("hf://acme/arm@v1", what="policy.checkpoint")
    assert "policy.checkpoint = hf://acme/arm@v1: it is not" in str(refusal.value)
    assert "run: hf download acme/arm --revision v1 --include" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    ["hf://arm", "hf://a/b/c", "hf://a/b@", "hf://../b", "hf:///b", "hf://a b/c"]
    + [f"hf://a/b@{revision}" for revision in ("../../secret", "..", "/etc/x", "a/../b", "a//b", "a/", ".hidden")],
)
def test_a_name_has_one_form(text: str, hub: LocalHub) -> None:
    with pytest.raises(ConfigError, match=r"it must look like hf://owner/name"):
        pinned(recipe(text))
    assert not hub.requests


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf://acme/leg", "there is no model acme/leg"),
        ("hf://acme/arm@v9", "acme/arm has no revision v9"),
        (f"hf://acme/arm@{'0' * 40}", f"acme/arm has no revision {'0' * 40}"),
        ("s3://acme/arm", "begins with hf://"),
    ],
)
def test_wrong_names_are_refused(name: str, problem: str, hub: LocalHub) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        fetched_folder(pinned(recipe(name))["policy"]["checkpoint"])
    assert "\n" not in str(refusal.value)


def test_a_gated_repository_needs_an_account(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(REPO)
    with pytest.raises(ConfigError, match=r"is gated.*accept its conditions.*HF_TOKEN"):
        fetched_folder("hf://acme/arm")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched_folder("hf://acme/arm") / "config.json").is_file()


@long(5, "the client waits between its tries")
def test_a_download_that_breaks_is_one_sentence(hub: LocalHub) -> None:
    hub.broken.add("model.safetensors")
    with pytest.raises(MissingError, match="try again, or run: hf download") as refusal:
        fetched_folder("hf://acme/arm")
    assert "\n" not in str(refusal.value)
    with pytest.raises(MissingError, match="not completely"):
        local_folder(f"hf://acme/arm@{hub.branches[REPO]['main']}")
    hub.broken.clear()
    assert (fetched_folder("hf://acme/arm") / "model.safetensors").stat().st_size == len(FILES["model.safetensors"])


def test_a_repository_without_a_checkpoint_is_refused(hub: LocalHub) -> None:
    hub.commit("models/acme/text", {"README.md": b"only this"})
    with pytest.raises(ConfigError, match=r"it has none of \*.safetensors"):
        fetched_folder("hf://acme/text")


def test_a_dataset_has_its_own_names(hub: LocalHub) -> None:
    hub.commit("datasets/acme/demos", {"meta/info.json": b"{}", "data/a.parquet": b"1", "notes.txt": b"2"})
    found = pinned({"demonstrations": {"dataset": {"folder": "hf://datasets/acme/demos"}}})
    name = found["demonstrations"]["dataset"]["folder"]
    assert (fetched_folder(name, "dataset") / "data" / "a.parquet").is_file()
    assert hub.downloads() == ["data/a.parquet", "meta/info.json"]


def test_a_folder_is_uploaded_as_one_commit(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"abc")
    (made / "policy.json").write_text(json.dumps({"version": 3}))
    with pytest.raises(ConfigError, match="has no token"):
        hub_files.push(made, "hf://me/arm", "model", public=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    name = hub_files.push(made, "hf://me/arm", "model", public=False)
    assert hub.private["models/me/arm"]
    assert (fetched_folder(name) / "policy.json").read_text() == '{"version": 3}'
    with pytest.raises(ConfigError, match=r"\(403\)"):
        hub_files.push(made, "hf://others/arm", "model", public=False)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"\(401\)"):
        hub_files.push(made, "hf://me/arm", "model", public=False)


def test_a_ref_that_holds_no_commit_is_not_read(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched_folder("hf://acme/arm@main")
    (ref,) = (tmp_path / "cache").glob("models--acme--arm/refs/main")
    ref.write_text("a secret")
    disconnect(monkeypatch)
    assert pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"] == "hf://acme/arm"


@pytest.mark.parametrize("lost", ["model.safetensors", "assets/arm/norm_stats.json"])
def test_without_a_list_of_files_the_hub_is_asked(
    lost: str, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = pinned(recipe("hf://acme/arm"))["policy"]["checkpoint"]
    (fetched_folder(name) / lost).unlink()
    for copy in ("online", "offline"):
        left_out = shutil.ignore_patterns("trees")
        shutil.copytree(tmp_path / "cache", tmp_path / copy, symlinks=True, ignore=left_out)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "online"))
    assert (fetched_folder(name) / lost).read_bytes() == FILES[lost]
    assert not caplog.messages
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "offline"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at import
    assert not (fetched_folder(name) / lost).exists()
    assert "some may be missing; where there is a connection run: hf download acme/arm" in caplog.text


class Named:
    """A configuration with a policy's checkpoint."""

    def __init__(self, checkpoint: str) -> None:
        self.policy, self.checkpoint = self, checkpoint


def test_a_run_does_not_begin_with_a_branch(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    address = os.environ["HF_ENDPOINT"]
    disconnect(monkeypatch)
    name = pinned(recipe("hf://acme/arm@main"))["policy"]["checkpoint"]
    monkeypatch.setenv("HF_ENDPOINT", address)  # it answers again
    fixed = f"hf://acme/arm@{hub.branches[REPO]['main']}"
    with pytest.raises(ConfigError, match=f"start again, or set policy.checkpoint={fixed}"):
        fetch(cast(Any, Named(name)))
    fetch(cast(Any, Named(fixed)))


def made_policy(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "policy": {"tokenizer": "/home/me/tokens"},
        "tracking": [{"type": "mlflow", "uri": "https://me:secret@tracker.local"}],
        "ray": {"address": "tracker.local:6379"},
        "out_dir": "../home/me/runs",
        "env": {"kwargs": {"/home/me/asset": "sqlite:////home/me/x.db"}},
    }
    snapshot = f"/home/me/hub/models--acme--arm/snapshots/{'a' * 40}"
    texts = {
        "policy.json": {"policy": config["policy"], "version": 3, "env": config["env"], "config": config},
        "adapter_config.json": {"base_model_name_or_path": snapshot, "r": 4},
        "config.json": {"_name_or_path": "/home/me/base"},
        "tokenizer.json": {"vocab": {"/a": 1, "~": 2}},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"abc")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def made_dataset(folder: Path) -> Path:
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps({"total_episodes": 4, "fps": 10}))
    recorded = {"env": {"root": "/home/me/assets"}, "policy": "../home/me/run"}
    (folder / "meta" / "polyrhythm.json").write_text(json.dumps({"recorded": recorded}))
    (folder / "data").mkdir()
    (folder / "data" / "a.parquet").write_bytes(b"1")
    return folder


def test_no_uploaded_file_names_this_machine(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = write_run(tmp_path / "run")
    made, demos = made_policy(tmp_path / "made"), made_dataset(tmp_path / "demos")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    (made / "config.yaml").unlink()
    hub_files.push(made, "hf://me/arm", "model", public=False, run=run)
    hub_files.push(demos, "hf://me/demos", "dataset", public=False)
    for repo in ("models/me/arm", "datasets/me/demos"):
        (_, found) = hub.files(repo, "main") or ("", {})
        for name, data in found.items():
            assert not any(secret in data for secret in (b"/home", b"secret", b"tracker.local")), name
        assert b"Polyrhythm" in found["README.md"]
    (_, found) = hub.files("models/me/arm", "main") or ("", {})
    assert json.loads(found["adapter_config.json"]) == {
        "base_model_name_or_path": "acme/arm", "revision": "a" * 40, "r": 4
    }  # fmt: skip
    assert found["tokenizer.json"] == (made / "tokenizer.json").read_bytes()
    assert json.loads(found["policy.json"])["config"]["policy"] == {"tokenizer": "tokens"}
    assert "config.yaml" in found
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert {file: data for file, data in before.items() if file != made / "config.yaml"} == after, "folders stay"


def test_a_second_upload_replaces_files_of_its_kinds_alone(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    made, demos = tmp_path / "made", made_dataset(tmp_path / "demos")
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"new")
    hub.commit("models/me/arm", {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"n", "README.md": b"mine"})
    hub.commit("datasets/me/demos", {"data/chunk-009/b.parquet": b"old", "notes.txt": b"n"})
    hub_files.push(made, "hf://me/arm", "model", public=False)
    hub_files.push(demos, "hf://me/demos", "dataset", public=False)
    (_, found) = hub.files("models/me/arm", "main") or ("", {})
    assert found == {"model.safetensors": b"new", "notes.txt": b"n", "README.md": b"mine"}
    (_, found) = hub.files("datasets/me/demos", "main") or ("", {})
    assert sorted(found) == ["README.md", "data/a.parquet", "meta/info.json", "meta/polyrhythm.json", "notes.txt"]
    card = found["README.md"]
    (demos / "meta" / "info.json").write_text(json.dumps({"total_episodes": 8, "fps": 10}))
    hub_files.push(demos, "hf://me/demos", "dataset", public=False)
    (_, found) = hub.files("datasets/me/demos", "main") or ("", {})
    assert found["README.md"] != card, "a card of ours is made anew"
    (demos / "README.md").write_text("my own words")
    hub_files.push(demos, "hf://me/demos", "dataset", public=False)
    (_, found) = hub.files("datasets/me/demos", "main") or ("", {})
    assert found["README.md"] == b"my own words"
