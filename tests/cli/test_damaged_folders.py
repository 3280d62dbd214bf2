"""Every file of a run's folder, damaged in every way: a command then succeeds or says in one sentence what is wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.long import long
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge

SMALL = merge(
    LOCKSTEP,
    {
        "env": {"max_steps": 10},
        "training": {"versions": 2, "mini_batch_samples": 4, "epochs": 1},
        "evaluation": {"episodes": 2, "every": 1, "weights": "second_copy", "rows": 2},
        "checkpoint": {"run_every_s": 0},
    },
)
RandomDamage = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, rng: random.Random) -> bytes:
    """Some bytes are others."""
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 3, 30))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def digit(content: bytes, rng: random.Random) -> bytes:
    """Some digits are others: still text, perhaps still JSON."""
    places = [place for place, byte in enumerate(content[:20_000]) if 48 <= byte < 58]
    changed = bytearray(content)
    for place in rng.sample(places, min(3, len(places))):
        changed[place] = rng.randrange(48, 58)
    return bytes(changed)


def lose(content: bytes, rng: random.Random) -> bytes:
    """A piece is missing."""
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start + rng.randrange(1, 60) :]


def instead(content: bytes, rng: random.Random) -> bytes:
    """Something else altogether."""
    return rng.choice(
        (b"", b"[]", b"[1]", b"[[]]", b"{}", b"null", b"3", b'"x"', b"\xff\xfe\0", b'{"done": {"rl": 3}}')
    )


DAMAGES: tuple[RandomDamage, ...] = (flip, digit, lose, instead)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(SMALL))
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def damage(path: Path, rng: random.Random) -> None:
    """Something happens to this file: it goes, becomes a folder, or its content changes."""
    how = rng.randrange(10)
    if how < 2:
        path.unlink()
        if how:
            path.mkdir()
    else:
        path.write_bytes(rng.choice(DAMAGES)(path.read_bytes(), rng))


def commands(run: Path, *, unfinished: bool) -> list[list[str]]:
    more = [] if unfinished else ["training.versions=3"]
    return [["report", str(run)], ["eval", str(run), "--episodes", "2"], ["resume", str(run), *more]]


@pytest.mark.parametrize(("seed", "tried"), [(3, 1), pytest.param(3, 3, marks=long(10, "every command"))])
def test_a_damaged_run_folder_never_ends_in_a_traceback(
    seed: int, tried: int, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file in turn, of a finished run or of one that was cut before its end; so many of the commands."""
    rng = random.Random(seed)
    files = sorted(path.relative_to(finished) for path in finished.rglob("*") if path.is_file())
    assert {"run.json", "trainer.pt", "samples.npz", ".lock", "evaluations.json"} <= {file.name for file in files}
    for number, file in enumerate(files):
        run = Path(shutil.copytree(finished, tmp_path / str(number)))
        unfinished = rng.random() < 0.5 and file.name != "summary.json"
        if unfinished:
            (run / "summary.json").unlink()
            if rng.random() < 0.5 and file.name != "progress.json":
                (run / "progress.json").unlink()
        damage(run / file, rng)
        every = commands(run, unfinished=unfinished)
        for words in (every * 2)[number % 3 :][:tried]:
            capsys.readouterr()
            status = main(words)
            told = capsys.readouterr().err
            assert status in (0, 2), (words, file, told)
            errors = [line for line in told.splitlines() if line.startswith("polyrhythm: error:")]
            assert len(errors) == (status == 2), (words, file, told)
            assert "Traceback" not in told, (words, file, told)
            assert "nothing has happened for" not in told, (words, file, told)
        shutil.rmtree(run)
