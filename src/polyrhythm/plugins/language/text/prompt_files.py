"""Reads prompts and answers from files: JSON lines, JSON, CSV and Parquet, with the columns of verl and TRL.

Every row is read and checked before anything else starts; an error names the file, the line and the remedy.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.errors import ConfigError, MissingError, install_command

#: Columns that are recognised where the settings name none: of TRL, and of data sets in its layout.
_PROMPTS = ("prompt", "question", "problem")
_ANSWERS = ("answer", "solution", "ground_truth")
#: Columns that an error lists.
_LISTED = 20

Row = Mapping[str, Any]
#: Rows of a file's content with their places in it, such as `line 3`; what: the file, for errors.
Reader = Callable[[bytes, str], Iterator[tuple[str, Any]]]


class PromptRow(NamedTuple):
    """prompt: a text, or turns, each with role and content; source_line: file and line, for errors."""

    prompt: str | list[dict[str, str]]
    answer: Any
    columns: Row
    source_line: str


def read_prompts(setting: str, files: Sequence[str], prompt: str, answer: str, *, structured: bool) -> list[PromptRow]:
    """All rows of the files, in order. setting: that names the files; prompt, answer: names of columns, dotted within
    nested ones, or "" to recognise them; structured: whether an answer may be other than a text or a number.

    MissingError: a file, or the package that reads it, does not exist; ConfigError: it has no rows, or an invalid one.
    """
    found = []
    for file in files:
        what = f"{setting} = {file}"
        rows = list(_rows(Path(file).expanduser(), what))
        if not rows:
            raise ConfigError(f"{what}: it has no rows; name a file with prompts")
        first = rows[0][1]
        verl = isinstance(first.get("reward_model"), Mapping) and "ground_truth" in first["reward_model"]
        asked = prompt or _recognised("prompt", first, _PROMPTS, what)
        answered = answer or ("reward_model.ground_truth" if verl else _recognised("answer", first, _ANSWERS, what))
        for source_line, row in rows:
            texts = _prompt_of(_value(row, asked, "env.prompt", source_line), asked, source_line)
            value = _value(row, answered, "env.answer", source_line)
            if problem := _problem(value, structured=structured):
                raise ConfigError(f"env.answer = {answered}: in {source_line} it is {problem}")
            found.append(PromptRow(texts, value, row, source_line))
    return found


def _recognised(name: str, row: Row, known: Sequence[str], what: str) -> str:
    for column in known:
        if column in row:
            return column
    raise ConfigError(
        f"{what}: no column for env.{name} is recognised ({', '.join(known)}); set env.{name} to one of its columns: "
        f"{_listed(row)}"
    )


def _listed(row: Row) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _value(row: Row, column: str, setting: str, source_line: str) -> Any:
    """The value of a column; `a.b` is b within a, unless there is a column of that name."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"{setting} = {column}: {source_line} has no such column but {_listed(row)}; name one that all rows "
                "have"
            )
        value = value[part]
    return value


def _prompt_of(value: Any, column: str, source_line: str) -> str | list[dict[str, str]]:
    what = f"env.prompt = {column}: in {source_line} it is"
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{what} empty; give it a text, or delete the row")
        return value
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{what} {_kind(value)}; a text or a list of messages is needed")
    turns: list[Any] = []
    for entry in value:
        turn = {key: entry.get(key) for key in ("role", "content")} if isinstance(entry, Mapping) else {"role": None}
        if not all(isinstance(text, str) for text in turn.values()):
            raise ConfigError(f"{what} a list with {entry!r:.80}; each message has a role and a content, both texts")
        turns.append(turn)
    return turns


def _problem(answer: Any, *, structured: bool) -> str:
    """What is wrong with an answer, "" if nothing is."""
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return "empty; give it an answer, or delete the row"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"{answer}; give it an answer, or delete the row"
    if not structured and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        return f"{_kind(answer)}; this verifier compares texts and numbers (json: all others)"
    return ""


def _kind(value: Any) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"


def _rows(path: Path, what: str) -> Iterator[tuple[str, Row]]:
    packed = path.suffix.lower() == ".gz"
    reader = _READERS.get((path.with_suffix("") if packed else path).suffix.lower())
    if reader is None or (packed and reader is _parquet):
        raise ConfigError(
            f"{what}: its format is unknown; name a file that ends in {', '.join(_READERS)}, or in .gz after that"
        )
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if packed else content
    except FileNotFoundError as error:
        raise MissingError(f"{what}: there is no such file (from {Path.cwd()}); correct the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{what}: it is a folder; name its files") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"{what}: it is not a whole gzip file ({error}); get it again") from error
    except OSError as error:
        raise ConfigError(f"{what}: it cannot be read ({error.strerror or error}); check its permissions") from error
    if not content:
        raise ConfigError(f"{what}: it is empty; name a file with prompts")
    for place, row in reader(content, what):
        if not isinstance(row, dict):
            raise ConfigError(f"{what}, {place}: it is {_kind(row)}, not an object with columns; correct or delete it")
        yield f"{path.name}, {place}", row


def _text(content: bytes, what: str) -> str:
    """Decode a file, without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{what}, line {line}: it is not UTF-8 ({error.reason}); convert the file") from error


def _parsed(text: str, what: str) -> Any:
    """Parse JSON; NaN and infinities are errors."""

    def refuse(name: str) -> Any:
        raise ConfigError(f"{what}: it has {name}, which is not JSON; give a number, or delete the row")

    try:
        return json.loads(text, parse_constant=refuse)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: it is not JSON ({error}); correct or delete it") from error


def _json_lines(content: bytes, what: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(content, what).split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{what}, line {number}")


def _json(content: bytes, what: str) -> Iterator[tuple[str, Any]]:
    rows = _parsed(_text(content, what), what)
    if not isinstance(rows, list):
        raise ConfigError(f"{what}: it is {_kind(rows)}, not a list of rows; name a .jsonl file for one row a line")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _csv(content: bytes, what: str) -> Iterator[tuple[str, Any]]:
    reader = csv.reader(io.StringIO(_text(content, what), newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) != len(header) or not all(header):
            raise ConfigError(f"{what}, line 1: columns without a name, or with one twice; name each once")
        for entries in filter(None, reader):
            if len(entries) != len(header):
                raise ConfigError(
                    f"{what}, line {reader.line_num}: it has {len(entries)} entries, the first line has {len(header)}; "
                    "correct it, or put texts with commas and line ends in quotes"
                )
            yield f"line {reader.line_num}", dict(zip(header, entries, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{what}, line {reader.line_num}: it is not CSV ({error}); correct it") from error


def _parquet(content: bytes, what: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingError(
            f"{what}: Parquet needs the package pyarrow, which is not installed; run: {install_command('parquet')}"
        ) from error
    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{what}: it is not a Parquet file ({str(error).splitlines()[0]}); get it again") from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"row {number}", row


_READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
