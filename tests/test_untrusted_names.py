"""Names that downloaded files give lead to files inside their folder alone, and links out of it are not copied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.plugins.pretrained.released import TOY, random_state, write_folder

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm.files import inner_path
from polyrhythm.plugins.lerobot.recording import remove_unlisted
from polyrhythm.plugins.lerobot.writing import Journal
from polyrhythm.plugins.pretrained.building import save_folder
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.training.checkpoint import save_state

STRANGE = [
    "../victim/model.safetensors",
    "/etc/passwd",
    "a/../../victim/model.safetensors",
    "..",
    ".",
    "",
    "   ",
    "a//b",
    "nul\0byte",
    "..\\victim",
    "two\nlines",
    "\x1b[31mred",
    "right\u202eleft",
]


@pytest.mark.parametrize("name", [*STRANGE, None, 3, ["a"]])
def test_a_strange_name_is_no_path(tmp_path: Path, name: object) -> None:
    for folders in (False, True):
        with pytest.raises(ValueError, match="is not ") as told:
            inner_path(tmp_path, name, folders=folders)
        assert str(told.value).isprintable()


def test_a_plain_name_is_a_path_in_the_folder(tmp_path: Path) -> None:
    assert inner_path(tmp_path, "..model—é .safetensors") == tmp_path / "..model—é .safetensors"
    assert inner_path(tmp_path, "data/chunk-000/x", folders=True) == tmp_path / "data" / "chunk-000" / "x"
    with pytest.raises(ValueError, match="'data/x' is not a plain file name, without folders"):
        inner_path(tmp_path, "data/x")


@pytest.mark.parametrize("name", [*STRANGE, "sub/model.safetensors"])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    victim = tmp_path / "victim" / "model.safetensors"
    victim.parent.mkdir()
    save_file(random_state(), victim)
    before = victim.read_bytes()
    base = write_folder(tmp_path / "base", random_state(), shards=2)
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], name)
    index.write_text(json.dumps(content))
    run = tmp_path / "run"
    run.mkdir()
    section = {"type": "pi0", "checkpoint": str(base)}
    save_state(
        {"policy": {"network.own": torch.ones(2, 8)}, "config": {"policy": section}, "version": 1}, run / "policy.pt"
    )
    for words in (["inspect", str(base)], ["export", str(run), "--base", str(base), "--out", str(tmp_path / "out")]):
        assert main(["policies", *words]) == 2
        said = capsys.readouterr().err
        assert "model.safetensors.index.json: " in said
        assert said.removesuffix("\n").isprintable()
    assert victim.read_bytes() == before
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()


# ------------------------------------------------------------ links


def test_a_recording_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    other, data = tmp_path / "other", tmp_path / "recording" / "data"
    (data / "chunk-001").mkdir(parents=True)
    other.mkdir()
    for path in (other / "precious", data / "chunk-001" / "file-000.parquet.part"):
        path.touch()
    (data / "chunk-000").symlink_to(other)
    remove_unlisted(tmp_path / "recording", Journal({}))
    assert (other / "precious").exists()
    assert list(data.glob("*/*")) == [data / "chunk-000" / "precious"]


def _saved(base: Path, out: Path) -> Path:
    state = {f"network.{name}": x + 1.0 for name, x in random_state().items()}
    save_folder(Checkpoint.open(base), TOY, state, out)
    return out


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _file(base: Path, secret: Path) -> None:
    (base / "tokenizer.json").symlink_to(secret / "key")


def _file_below(base: Path, secret: Path) -> None:
    (base / "assets").mkdir()
    (base / "assets" / "norm_stats.json").symlink_to(os.path.relpath(secret / "key", base / "assets"))


def _folder(base: Path, secret: Path) -> None:
    (base / "assets").symlink_to(secret)


def _folder_inside(base: Path, secret: Path) -> None:
    (base / "assets").mkdir()
    (base / "assets" / "again").symlink_to(base)  # would be copied without an end


def _weights(base: Path, secret: Path) -> None:
    (base / "model.safetensors").rename(secret / "weights")
    (base / "model.safetensors").symlink_to(secret / "weights")


def _ours(base: Path, secret: Path) -> None:
    save_file({"critic.weight": torch.ones(1)}, secret / "ours")
    (base / "polyrhythm.safetensors").symlink_to(secret / "ours")


@pytest.mark.parametrize("link", [_file, _file_below, _folder, _folder_inside, _weights, _ours])
def test_links_out_of_the_base_are_read_and_never_copied(tmp_path: Path, link: Any) -> None:
    secret, base = tmp_path / "secret", write_folder(tmp_path / "base", random_state())
    secret.mkdir()
    (secret / "key").write_text("private")
    link(base, secret)
    before = _files(secret), sorted(base.iterdir())
    assert Checkpoint.open(base).tensors
    with pytest.raises(ConfigError, match=r"is a link to .*, which is not copied; .* \(cp -rL\)"):
        _saved(base, tmp_path / "out")
    assert (_files(secret), sorted(base.iterdir())) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "secret"]


def test_links_of_a_download_cache_are_copied_as_files(tmp_path: Path) -> None:
    blobs, base = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    write_folder(base, random_state())
    (base / "assets").mkdir()
    (base / "assets" / "norm_stats.json").write_text("{}")
    (base / "README.md").write_text("about")
    (base / "again.md").symlink_to("README.md")
    for number, path in enumerate(sorted(path for path in base.rglob("*") if path.is_file() and not path.is_symlink())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    before = _files(blobs)
    given = Path(os.path.relpath(base))  # by a path relative to the working folder, as a link itself
    (tmp_path / "link").symlink_to(base)
    for number, named in enumerate((base, given, tmp_path / "link")):
        out = _saved(named, tmp_path / f"out{number}")
        assert not any(path.is_symlink() for path in out.rglob("*"))
        assert {"assets/norm_stats.json", "README.md", "again.md", "config.json"} <= _files(out).keys()
        assert (out / "again.md").read_text() == "about"
    assert _files(blobs) == before
    assert all(path.is_symlink() for path in base.rglob("*") if path.is_file())


def test_a_pipe_in_a_folder_is_left_out(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", random_state())
    os.mkfifo(base / "pipe")
    assert not (_saved(base, tmp_path / "out") / "pipe").exists()
