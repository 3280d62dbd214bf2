"""Prompts and answers from files: each prompt is answered in one message, which a verifier compares with the answer.

Training rows are the environment's `training_states`, held-out rows its `initial_states`. An episode's row is its seed
modulo their number. The scheduler chooses seeds such that an epoch of training has every row once, in an order that
depends only on the run's seed and the group's number; evaluations take the held-out rows in order. Invariant: no prompt
is both trained on and held out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.answer_verifiers import AnyVerifier, Exact, Verdict, Verifier, as_text
from polyrhythm.plugins.language.text.base import Count, TextSettings
from polyrhythm.plugins.language.text.chat import ChatTurns, Prompt
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.plugins.language.text.prompt_files import PromptRow, read_prompts
from polyrhythm.plugins.language.text.tokenizers import begin
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.hashing import HELD_OUT

log = logging.getLogger(__name__)

#: Share of the prompts that is held out where there are no files of them.
_HELD_OUT = 0.05
#: Rows on whose own answers the verifier is tried before the start.
_TRIED = 256
#: Characters of a typical answer above which `exact` is warned of.
_LONG = 100

Files = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class PromptsSettings(TextSettings):
    """Prompts of files, answered in one message: the reward is 1 if the verifier accepts it, else 0."""

    type: Literal["prompts"] = "prompts"
    files: Annotated[Files, Field(min_length=1)]
    """Files of rows: .jsonl, .json, .csv (these also with .gz) or .parquet."""
    eval_files: Files = ()
    """Files of the prompts of evaluations; a prompt that occurs in them is not trained on."""
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Without eval_files: share of the prompts that only evaluations have, by a hash of the prompt; null for 0.05."""
    prompt: str = ""
    """Column of the prompt, a text or a list of messages, `a.b` within nested ones; empty: recognised."""
    answer: str = ""
    """Column of the answer; empty: recognised."""
    template: str = "{prompt}"
    """Text that the model is shown: {prompt} is replaced by the prompt, other braces stay."""
    verify: AnyVerifier = Exact()
    """exact, regex, math or json, each with settings of its own; module:function; none: a scorer judges."""
    min_verified: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the data's own answers that the verifier has to accept before the start."""
    success: float = 1.0
    """Least reward of an answer that succeeded."""
    max_new_tokens: Count = 512
    """Most tokens of a message; longer ones are cut, which ends the episode."""
    max_prompt_tokens: Count = 512
    """Most tokens of a prompt; longer ones are left out when the files are read."""

    traits: ClassVar = replace(TextSettings.traits, expert=True, references=True)
    metrics: ClassVar = MappingProxyType({"verifier_failed": "max"})

    @model_validator(mode="after")
    def _fits(self) -> PromptsSettings:
        if self.max_turns > 1:
            raise ValueError(f"max_turns = {self.max_turns}: a prompt is answered in one message; set it to 1")
        if self.eval_files and self.held_out is not None:
            raise ValueError(f"held_out = {self.held_out}: eval_files are what is held out; give one of the two")
        if "{prompt}" not in self.template:
            raise ValueError(f"template = {self.template!r}: it has no {{prompt}}; write where the prompt goes")
        return self

    def spec(self) -> EnvSpec:
        data = self.data()
        training, held_out = len(data.training), len(data.held_out)
        return replace(super().spec(), training_states=training, initial_states=held_out, data=data.digest)

    def conversation(self) -> Answering:
        return Answering(self)

    def check(self) -> None:
        """Check the text environment, then the verifier on the data's own answers. ConfigError: it accepts too few."""
        data = self.data()
        for note in data.notes:
            log.warning("%s", note)
        super().check()
        if self.verify.type != "none":
            _try_verifier(self, [*data.training, *data.held_out])
        words = "env.files: %d prompts for training, %d for evaluations, %d set aside"
        log.info(words, len(data.training), len(data.held_out), data.set_aside)

    def data(self) -> PromptData:
        """The rows, read once while size and time of the files do not change. ConfigError: they are invalid."""
        stamps = []
        for file in (*self.files, *self.eval_files):
            with suppress(OSError):  # reading it tells
                status = Path(file).expanduser().stat()
                stamps.append((file, status.st_size, status.st_mtime_ns))
        return _load(type(self), self.model_dump_json(), tuple(stamps))

    def reference(self, seed: int) -> Any:
        return self.data().row(seed).answer

    def shown(self, row: PromptRow) -> Prompt:
        """The row's prompt: a text, or turns for the chat template. ConfigError: turns without a template."""
        roles = [] if isinstance(row.prompt, str) else [turn["role"] for turn in row.prompt]
        if roles in ([], ["user"]):
            text = row.prompt if isinstance(row.prompt, str) else row.prompt[0]["content"]
            return self.template.replace("{prompt}", text)
        if self.open_chat() is not None:
            return row.prompt
        raise ConfigError(
            f"env.prompt: {row.source_line} is a conversation ({', '.join(roles)}), which needs a chat template; set "
            "env.chat to auto, or give prompts that are a text"
        )


class Answering:
    def __init__(self, settings: PromptsSettings) -> None:
        self._settings, self._verifier = settings, settings.verify.open()
        self._data = settings.data()
        self._row: PromptRow | None = None
        self._warned = False

    def begin(self, task: int, seed: int) -> Prompt:  # noqa: ARG002 - there is one
        self._row = self._data.row(seed)
        return self._settings.shown(self._row)

    def reply(self, message: str) -> Reply:
        assert self._row is not None
        verdict = self._verifier.verify(message, self._row.answer, self._row.columns)
        if verdict.failure and not self._warned:
            self._warned = True
            words = "env.verify cannot compare %.80r with the answer of %s (%s), so it counts as wrong; the metric "
            words += "verifier_failed counts others like it"
            log.warning(words, message, self._row.source_line, verdict.failure)
        metrics = {"verifier_failed": float(bool(verdict.failure))}
        return Reply(reward=verdict.reward, success=verdict.reward >= self._settings.success, metrics=metrics)

    def expert(self) -> str:
        assert self._row is not None
        return self._settings.verify.written(self._row.answer)

    def close(self) -> None:
        self._verifier.close()


class PromptData(NamedTuple):
    """Rows for training and held-out rows. set_aside: number of rows excluded for length or characters; notes:
    warnings about the data; digest: hash of the training prompts and answers, in order."""

    training: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    set_aside: int
    notes: tuple[str, ...]
    digest: str

    def row(self, seed: int) -> PromptRow:
        rows = self.held_out if seed & HELD_OUT else self.training
        return rows[seed % len(rows)]


@lru_cache(maxsize=4)
def _load(kind: type[PromptsSettings], given: str, stamps: Sequence[object]) -> PromptData:  # noqa: ARG001 - part of the key
    settings = kind.model_validate_json(given)
    columns, structured = (settings.prompt, settings.answer), settings.verify.structured
    rows = read_prompts("env.files", settings.files, *columns, structured=structured)
    notes = list[str]()
    if settings.eval_files:
        held_out = read_prompts("env.eval_files", settings.eval_files, *columns, structured=structured)
        known = {_identity(row) for row in held_out}
        training = [row for row in rows if _identity(row) not in known]
        if both := len(rows) - len(training):
            notes.append(f"env.eval_files: {both} of {len(rows)} rows of env.files have these prompts; not trained on")
    else:
        limit = (settings.held_out or _HELD_OUT) * 2**32
        held_out = [row for row in rows if zlib.crc32(_identity(row)) < limit]
        training = [row for row in rows if zlib.crc32(_identity(row)) >= limit]
    if not training or not held_out:
        side = "evaluations" if training else "training"
        raise ConfigError(
            f"env.files: of {len(rows)} rows none is left for {side}; give more, or other env.eval_files or "
            "env.held_out"
        )
    seen = len(training) + len(held_out)
    (training, held_out), why = _showable(settings, (training, held_out))
    set_aside = seen - len(training) - len(held_out)
    if not training or not held_out:
        side = "evaluations" if training else "training"
        raise ConfigError(f"env.files: all prompts of {side} are set aside: {why}")
    if why:
        notes.append(f"env.files: {set_aside} of {seen} prompts are set aside: {why}")
    notes += _ambiguous([*training, *held_out])
    compared = [
        (row.prompt if isinstance(row.prompt, str) else [list(turn.values()) for turn in row.prompt], row.answer)
        for row in training
    ]
    digest = hashlib.sha256(json.dumps(compared, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return PromptData(tuple(training), tuple(held_out), set_aside, tuple(notes), digest)


def _identity(row: PromptRow) -> bytes:
    """Key that is equal for equal prompts: their texts, stripped."""
    texts = [row.prompt] if isinstance(row.prompt, str) else [turn["content"] for turn in row.prompt]
    return "\n".join(text.strip() for text in texts).encode("utf-8", "surrogatepass")


def _ambiguous(rows: Iterable[PromptRow]) -> list[str]:
    """A warning about prompts with different answers, if there are any; 72.0 and '72' are equal."""
    first, several = dict[bytes, PromptRow](), dict[bytes, PromptRow]()
    for row in rows:
        known = first.setdefault(key := _identity(row), row)
        one, other = (as_text(x) if isinstance(x, str | int | float) else x for x in (known.answer, row.answer))
        if one != other:
            several.setdefault(key, row)
    if not several:
        return []
    key, row = next(iter(several.items()))
    shown = key.decode("utf-8", "replace")
    answers = ", and ".join(f"{one.answer!r:.80} ({one.source_line})" for one in (first[key], row))
    said = f"env.files: {len(several)} prompts have different answers in different rows, such as {shown!r:.80}"
    return [f"{said}: {answers}; each row counts its own as right: correct the data, or keep one row of each prompt"]


def _showable(settings: PromptsSettings, sides: Iterable[Sequence[PromptRow]]) -> tuple[list[list[PromptRow]], str]:
    """The rows of each side whose prompts fit whole, and a text on why others do not."""
    tokenizer, chat, limit = settings.text_tokenizer(), settings.open_chat(), settings.max_prompt_tokens
    kept, longest, without_id = list[list[PromptRow]](), 0, ""
    for rows in sides:
        kept.append([])
        for row in rows:
            shown = settings.shown(row)
            try:
                text = shown if chat is None else ChatTurns(chat, shown).shown
                length = len(begin(tokenizer, str(text)))
                if not length:
                    raise ValueError("it has no tokens")
            except (ValueError, TypeError) as error:  # the latter: of half a surrogate pair
                without_id = without_id or f"{row.source_line}: {error}"
                continue
            if length <= limit:
                kept[-1].append(row)
            else:
                longest = max(longest, length)
    long = f"some exceed env.max_prompt_tokens = {limit}, the longest has {longest}; raise it" if longest else ""
    lost = f"some cannot be encoded ({without_id:.300}); use another tokenizer" if without_id else ""
    return kept, ", and ".join(filter(None, (long, lost)))


def _try_verifier(settings: PromptsSettings, rows: Sequence[PromptRow]) -> None:
    """Try the verifier on the data's own answers. ConfigError: it accepts fewer than `min_verified` of them."""
    tried = rows[:: max(1, len(rows) // _TRIED)][:_TRIED]
    what, written = f"env.verify = {settings.verify.type}", settings.verify.written
    with closing(settings.verify.open()) as verifier:
        judged = [(row, *_verdict_on_own(settings, verifier, row)) for row in tried]
    if wrong := [one for one in judged if one[1].reward < settings.success]:
        row, verdict, too_long = wrong[0]
        why = f" ({verdict.failure})" if verdict.failure else ""
        said = (
            f"{what}: it does not accept {len(wrong)} of {len(tried)} of the data's own answers, such as that of "
            f"{row.source_line}, {row.answer!r:.80}, in the message {written(row.answer)!r:.80}{why}"
        )
        if len(wrong) > (1 - settings.min_verified) * len(tried):
            if too_long:
                raise ConfigError(f"{said}; raise env.max_new_tokens to {max(tokens for *_, tokens in wrong)}")
            raise ConfigError(f"{said}; use another verifier or env.answer, or lower env.min_verified")
        log.warning("%s; such rows can earn no reward", said)
    typical = median(len(written(row.answer)) for row in tried)
    if settings.verify.type == "exact" and typical > _LONG:
        words = "env.verify = exact: a typical answer has %d characters, all of which a message has to repeat; for "
        words += "worked solutions use math, or regex with a pattern"
        log.warning(words, typical)


def _verdict_on_own(settings: PromptsSettings, verifier: Verifier, row: PromptRow) -> tuple[Verdict, int]:
    """The verdict on a row's own answer, and the answer's length if it exceeds the limit, else 0. With `exact` the
    model must be able to write the answer; the expert's messages are checked with the demonstrations."""
    message, limit = settings.verify.written(row.answer), settings.max_new_tokens
    if settings.verify.type == "exact":
        try:
            length = len(settings.text_tokenizer().encode(message)) + 1
        except (ValueError, TypeError) as error:
            return Verdict(0.0, str(error)), 0
        if length > limit:
            return Verdict(0.0, f"it has {length} tokens with its end, env.max_new_tokens is {limit}"), length
    try:
        return verifier.verify(message, row.answer, row.columns), 0
    except Exception as error:
        words = (
            f"env.verify = {settings.verify.type}: at the answer of {row.source_line} it {raised(error)}; correct it"
        )
        raise ConfigError(words) from error
