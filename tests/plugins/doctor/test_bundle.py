"""The archive for a bug report: what is in it, and what never is."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from polyrhythm.cli.main import main
from polyrhythm.plugins.doctor.bundle import REDACTED, Redaction, write_bundle

#: Made-up secrets of the forms that are recognized, and a line that each could stand in.
_SECRETS = {
    "hf_" + "Ab1" * 11: "downloading with {}",
    "sk-" + "proj-" + "x9" * 12: "POST /v1/chat {}",
    "ghp_" + "q7Q" * 12: "git clone {}",
    "github_pat_" + "a1_" * 10: "git push {}",
    "0123456789abcdef" * 3: "wandb: {}",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl": "Authorization: Bearer {}",
    "hunter22": 'password = "{}"',
    "correcthorse": "?user=me&token={}&page=1",
    "me:letmein": "https://{}@example.org/simple",
    "s3cr3t-words": "{{'api_key': '{}'}}",
    "AKIA" + "ABCD1234" * 2: "aws {}",
    "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----": "key:\n{}\nend",
}


@pytest.mark.parametrize("secret", _SECRETS)
def test_a_secret_is_redacted_wherever_it_stands(secret: str) -> None:
    line = _SECRETS[secret].format(secret)
    found = Redaction({}).text(f"before\n{line}\nafter")
    assert secret.split("\n", maxsplit=1)[0] not in found
    assert REDACTED in found
    assert found.startswith("before\n")
    assert found.endswith("\nafter")


def test_values_of_secret_variables_are_redacted_in_any_text() -> None:
    redaction = Redaction(
        {"WANDB_API_KEY": "plainwords1", "MY_TOKEN": "other-words", "TOKENIZERS_PARALLELISM": "false"}
    )
    assert redaction.text("a plainwords1 b other-words c false") == f"a {REDACTED} b {REDACTED} c false"


def test_settings_without_secrets_stay_as_they_are() -> None:
    settings = {
        "seed": 3,
        "policy": {"tokenizer": "folder", "max_tokens": 64, "micro_batch_tokens": 512, "keys": ["a"]},
        "rollout": {"queue_key": "fast"},
        "prometheus": {"key": ""},
    }
    kept = Redaction({}).plain(settings)
    assert kept["policy"] == settings["policy"]
    assert kept["seed"] == 3
    lines = "tokens: 64\nlr = 1e-3\ntoken budget 12\nmax_tokens=128 token: null"
    assert Redaction({}).text(lines) == lines


def test_the_users_home_is_not_named() -> None:
    assert Redaction({}).text(f"{Path.home()}/project/run") == "~/project/run"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "logs" / "host-1").mkdir(parents=True)
    config = {
        "name": "mine",
        "policy": {"engine": {"api_key": "letters", "headers": {"Authorization": "Basic abcdefgh12"}}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(20_000)))
    (run / "logs" / "main.log").write_text("WARNING retry with token=abcdef123\n")
    (run / "logs" / "host-1" / "simulator-0.0.log").write_bytes(b"bad byte \xff\nlast line\n")
    (run / "policy.pt").write_bytes(b"weights")
    (run / "conversations.jsonl").write_text("private words")
    (tmp_path / "id_rsa").write_text("private file")
    (run / "logs" / "linked.log").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.log").write_text("private file")
    (run / "logs" / "folder").symlink_to(tmp_path / "elsewhere")
    return run


def _read(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        return {one.name.partition("/")[2]: opened.extractfile(one).read().decode() for one in opened}  # type: ignore[union-attr]


def test_a_bundle_has_versions_findings_settings_and_the_ends_of_logs(run_folder: Path, tmp_path: Path) -> None:
    written = write_bundle(tmp_path / "bug.tar.gz", [{"name": "cores", "state": "ok"}], run_folder)
    inside = _read(tmp_path / "bug.tar.gz")
    assert set(written) == set(inside) == {
        "machine.json", "packages.txt", "run/config.yaml", "run/metrics.jsonl", "run/logs/main.log",
        "run/logs/host-1/simulator-0.0.log",
    }  # fmt: skip
    machine = json.loads(inside["machine.json"])
    assert machine["doctor"] == [{"name": "cores", "state": "ok"}]
    assert any(line.startswith("torch==") for line in inside["packages.txt"].splitlines())
    assert yaml.safe_load(inside["run/config.yaml"])["name"] == "mine"
    assert inside["run/metrics.jsonl"].endswith('{"step": 19999}\n')
    assert len(inside["run/metrics.jsonl"]) < 101_000
    everything = "".join(inside.values())
    for private in ("letters", "abcdefgh12", "abcdef123", "private", "weights"):
        assert private not in everything


def test_the_command_writes_it_once_and_refuses_what_is_no_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYRHYTHM_TOKEN", "environment-words")
    archive = tmp_path / "bug.tar.gz"
    words = ["doctor", "latency", "--json", "--bundle", str(archive), "--run", str(run_folder)]
    assert main(words) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["ready"]
    assert "read it before you send it" in told.err
    assert "environment-words" not in "".join(_read(archive).values())
    assert main(words) == 2  # never overwritten
    assert main(["doctor", "latency", "--run", str(run_folder)]) == 2
    assert (
        main(["doctor", "latency", "--bundle", str(tmp_path / "b.tar.gz"), "--run", str(tmp_path / "elsewhere")]) == 2
    )
    assert not (tmp_path / "b.tar.gz").exists()


def test_settings_that_cannot_be_read_are_taken_as_text(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1\ntoken: abcdefgh\n")
    write_bundle(tmp_path / "bug.tar.gz", [], tmp_path)
    text = _read(tmp_path / "bug.tar.gz")["run/config.yaml"]
    assert "a: [1" in text
    assert "abcdefgh" not in text
