"""The cards of uploaded policies and datasets, and the options of export."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from polyrhythm.cli.main import main
from polyrhythm.plugins.hub.card import is_card, write_dataset_card, write_model_card
from polyrhythm.plugins.hub.cleaning import without_paths


def write_run(folder: Path, *, success: bool = True) -> Path:
    folder.mkdir()
    settings = {
        "env": {"type": "gymnasium", "id": "Reach-v0", "tasks": [{"instruction": "````\n<script>go</script>"}]},
        "policy": {"type": "pi0", "checkpoint": f"hf://acme/pi0@{'a' * 40}", "tokenizer": "/home/me/secret/tokens"},
        "freshness": {"sync_interval": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    rate = {"rate": 0.5, "low": 0.25, "high": 0.75} if success else {}
    lines: list[dict[str, float]] = []
    for step in range(4):
        if step:
            own = {"env/success_once": step / 4} if success else {}
            transitions = {"throughput/transitions": 100.0 * step, "throughput/transitions_per_s": 9.0}
            lines.append({"step": step, "env/episodes": 40.0, "env/return": 1.0, **transitions, **own})
        told = {f"evaluation/greedy/{name}": value for name, value in {**rate, "mean_return": 2.0}.items()}
        lines.append({"step": step, **told})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text("{}")
    return folder


@pytest.mark.parametrize("inner", ["", "policy.pt", "checkpoints/run-3"])
def test_a_card_has_results_settings_and_command(tmp_path: Path, inner: str) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    write_model_card(out, run / inner, "me/reach")
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "acme/pi0"
    assert head["library_name"] == "polyrhythm"
    assert "| greedy | 200 | 50.0% [25.0%, 75.0%] | 2 |" in card
    assert "polyrhythm train config.yaml" in card
    assert "/home/me" not in card + (out / "config.yaml").read_text()
    assert "tokenizer: tokens" in card
    assert card.count("````") % 2 == 0, "no text of the run ends a block"
    with Image.open(out / "success.png") as curve:
        assert curve.size == (720, 320)


def test_without_success_or_a_run_the_card_is_shorter(tmp_path: Path) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    out.mkdir()
    plain.mkdir()
    write_model_card(out, write_run(tmp_path / "run", success=False), "me/reach")
    assert "not reported" in (out / "README.md").read_text()
    assert not (out / "success.png").exists()
    write_model_card(plain, plain, "me/reach", whole=True)
    assert "polyrhythm eval hf://me/reach" in (plain / "README.md").read_text()
    assert "## Evaluations" not in (plain / "README.md").read_text()


def test_a_dataset_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps({"total_episodes": 4, "fps": 10}))
    (tmp_path / "meta" / "polyrhythm.json").write_text(json.dumps({"recorded": {"env": {"root": "/data/own"}}}))
    write_dataset_card(tmp_path, tmp_path, "me/demos")
    card = (tmp_path / "README.md").read_text()
    assert is_card(card)
    assert "| total_episodes | 4 |" in card
    assert "/data" not in card


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        *[
            ("/a/b", "b"),
            ("~/b", "b"),
            ("a/b", "a/b"),
            (["/a", 1], ["a", 1]),
            ({"x": {"y": "/a/b/"}}, {"x": {"y": "b"}}),
        ],
        *[
            ("../priv/x", "x"),
            ("a/../../b", "b"),
            ("/", ""),
            ({"/a/b": 1, "~me/c": {"../d": 2}}, {"b": 1, "c": {"d": 2}}),
        ],
        *[
            ("sqlite:////home/me/x.db", "sqlite:///x.db"),
            ("file:///a/b", "file:///b"),
            ("sqlite:///../p/x", "sqlite:///x"),
        ],
        *[("https://user:pw@host/a", "https://host/a"), ("https://token@host", "https://host")],
        *[
            ("hf://a/b@main", "hf://a/b@main"),
            ("https://host/a/b", "https://host/a/b"),
            ("lift and/or push", "lift and/or push"),
        ],
        *[("--root=/home/me/x -v", "--root=x -v"), ("a:/home/me/x:/b/c", "a:x:c"), ("see '~/me/x'", "see 'x'")],
    ],
)
def test_folders_and_passwords_are_not_told(value: object, kept: object) -> None:
    assert without_paths(value) == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "name the new folder by --out, or a repository by --push"),
        (["run", "--out", "new", "--public"], "--public belongs to --push"),
        (["run", "--push", "me/reach"], "it is not a name that begins with hf://"),
        (["run", "--push", "hf://me/reach@main"], "a revision cannot be chosen"),
    ],
)
def test_export_says_what_is_missing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *words]) == 2
    assert said in capsys.readouterr().err
