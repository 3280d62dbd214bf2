"""What a YAML file of anybody's may cost is bounded, and what is wrong with it is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.config.load import load_config, parse_override
from polyrhythm.config.recipes import parse, read
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.virtual.simulate import load_cluster

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
MERGES = "m0: &m0 {k: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 30))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 400))

BAD = {
    "aliases that multiply": (ALIASES, "line 5, .*more than 100000 values"),
    "merges that multiply": (MERGES, "more than 100000 values"),
    "a chain of aliases": (CHAIN, "more than 64 deep by aliases"),
    "brackets": ("a: " + "[" * 5000, "more than 64 deep"),
    "indents": ("\n".join(" " * n + f"a{n}:" for n in range(300)), "more than 64 deep"),
    "a list in itself": ("a: &a [*a]", "line 1, column 4: it holds itself"),
    "a section in itself": ("a: &a {b: {c: *a}}", "holds itself"),
    "a merge of itself": ("a: &a {<<: *a}", "holds itself"),
    "a digit too many": ("seed: " + "1" * 1001, "not text has 1001 characters"),
    "a number in base 60": ("seed: 1" + ":59" * 100_000, "not text has 300001 characters"),
    "hexadecimals": ("seed: 0x" + "f" * 5000, "not text has 5002 characters"),
    "many bytes": ("# comment\n" * 200_000, "more than 1048576 characters"),
    "a key twice": ("seed: 1\nseed: 2", "key seed is given twice"),
    "a tab": ("env:\n\ttype: x", "cannot start any token"),
    "NUL": ("seed: 1\0", "unacceptable character #x0000"),
    "an object of Python": ("seed: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a list as key": ("? [a]\n: 1", "unhashable key"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_one_sentence_says_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    for load in (read, load_config, load_cluster):
        with pytest.raises(ConfigError, match=words) as raised:
            load(file)
        assert "\n" not in str(raised.value).strip()
        assert len(str(raised.value)) < len(str(file)) + 300


def test_overrides_are_bounded_likewise() -> None:
    for text, words in (
        ("env.kwargs=" + "[" * 5000, "more than 64 deep"),
        ("env.kwargs=&a [*a]", "holds itself"),
        (".".join(["a"] * 3000) + "=1", "3000 keys"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            parse_override(text)
        assert len(str(raised.value)) < 400


def test_aliases_and_merges_within_the_bounds_mean_what_they_say() -> None:
    assert parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]", "") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}] * 2,
    }
    assert parse("[" * 63 + "]" * 63, "") is not None
    assert len(parse("- 1\n" * 99_999, "")) == 99_999
