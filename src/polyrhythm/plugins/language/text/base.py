"""The interface of a text environment: a prompt, the model's messages, and replies to them.

A text environment is a `TextSettings` with a `conversation` method; `text.batch` wraps it as an env batch. One env step
is one message: a task with a single answer has one step per episode, an agent many.

The batch converts between text and ids (`text.tokenizers`), so policies see only ids. Observation: `tokens` int32
[max_prompt_tokens], the prompt and all earlier turns, zero-padded after `length` int32 []; `turn` int32 []. Action: a
message of at most `max_new_tokens` ids, ended by the first of `ActionSpec.stops`; later ids are not executed.
Environment text occurs only in observations, so no loss counts it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.envs.base import EnvTraits, EpisodeRefused, RowsFailed, traits_of
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.batch import STANDARD_METRICS, MessageTooLong, TextBatch
from polyrhythm.plugins.language.text.chat import Chat, ChatChoice, has_template, open_chat
from polyrhythm.plugins.language.text.conversation import Conversation
from polyrhythm.plugins.language.text.tokenizers import CHARACTERS, Tokenizer, character_tokenizer, folder_tokenizer
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task, Trajectory, Transcript
from polyrhythm.specs.hashing import HELD_OUT
from polyrhythm.specs.spaces import Aggregate

log = logging.getLogger(__name__)

#: One prompt in so many belongs to evaluations.
_APART = 8
#: Draws after which a task is said to have no prompts on one side.
_DRAWS = 1000
#: Tasks and prompts of each whose length is looked at before the start.
_TRIED_TASKS, _TRIED_PROMPTS = 8, 16

Count = Annotated[int, Field(ge=1)]
_Drawn = TypeVar("_Drawn")


class TextSettings(BaseModel):
    """Settings that all text environments have."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    tokenizer: str = CHARACTERS
    """characters: one token for each character of `alphabet`; or a local folder with a tokenizer.json."""
    chat: ChatChoice = "none"
    """Format of turns: none, plain text; auto, the chat template of the tokenizer's folder, if it has one; or settings
    of a template."""
    max_new_tokens: Count = 128
    """Most tokens of a message; longer ones are cut, which ends the episode."""
    max_prompt_tokens: Count = 256
    """Most tokens before a message: the prompt, with what the tokenizer begins with, and, in several turns, everything
    said since. Longer prompts are set aside."""
    max_turns: Count = 1
    """Most messages of an episode."""

    traits: ClassVar = EnvTraits(transcribes=True, checks_expert=True, async_steps=True, texts=True)
    #: Characters of the text, with the tokenizer `characters`.
    alphabet: ClassVar[str] = "".join(map(chr, range(32, 127))) + "\n"
    #: Texts of one token that end a message, as the end-of-text token does, but stay part of it.
    stops: ClassVar[tuple[str, ...]] = ()
    #: Names and descriptions of the tasks; () for one task, of the environment's type.
    tasks: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: The environment's own metrics (`Reply.metrics`), each with the aggregation over an episode.
    metrics: ClassVar[Mapping[str, Aggregate]] = MappingProxyType({})

    def conversation(self) -> Conversation:
        """A new conversation, for one row."""
        raise NotImplementedError(f"{type(self).__name__}: write conversation(self) -> Conversation")

    def spec(self) -> EnvSpec:
        """The spec of a batch. ConfigError: the tokenizer does not exist."""
        tokenizer = self.text_tokenizer()
        name = self._name
        integer = ArraySpec((), "int32")
        return EnvSpec(
            observation={
                "tokens": ArraySpec((self.max_prompt_tokens,), "int32"),
                "length": integer,
                "turn": integer,
            },
            action=ActionSpec("discrete", 1, choices=tokenizer.size, stops=self._stop_ids(tokenizer)),
            tasks=tuple(Task(*task) for task in self.tasks) or (Task(name, name),),
            max_steps=self.max_turns,
            metrics={**STANDARD_METRICS, **self.metrics},
            reports_success=True,
            chunk=self.max_new_tokens,
        )

    def build(self, rows: int) -> TextBatch:
        """A batch of `rows` conversations."""
        conversations = [self.conversation() for _ in range(rows)]
        tokenizer, chat = self.text_tokenizer(), self.open_chat()
        return TextBatch(self.spec(), traits_of(self), tokenizer, chat, conversations, self.metrics, self._name)

    @property
    def _name(self) -> str:
        return getattr(self, "type", type(self).__name__)

    def transcribe(self, trajectory: Trajectory) -> Transcript:
        """A finished sample as text: without end-of-text tokens and the tokenizer's prefix; prompt and messages
        without the markup of the chat template."""
        tokenizer, shown, length = self.text_tokenizer(), trajectory.obs["tokens"], trajectory.obs["length"]
        decode, first = tokenizer.decode, len(tokenizer.start)
        before = [decode(shown[step, first : int(length[step])].tolist()) for step in (0, trajectory.steps - 1)]
        actions, chat = trajectory.actions[:, :, 0], self.open_chat()
        lead, prompt = ("", before[0]) if chat is None else (chat.lead, chat.asked(before[0]))
        messages = tuple(
            decode(ids[valid].tolist()).removeprefix(lead) for ids, valid in zip(actions, trajectory.valid, strict=True)
        )
        return Transcript(prompt, messages, before[1] + messages[-1])

    def check(self) -> None:
        """MissingError: the tokenizer's package is not installed. ConfigError: most of the first prompts do not fit
        whole, or the chat template changes earlier turns. A warning, if some prompts do not fit."""
        chat = self.open_chat()
        if chat is not None:
            chat.check(self.max_turns)
        elif "chat" not in self.model_fields_set and has_template(self.tokenizer):
            words = "env.tokenizer = %s: it has a chat template, which is not applied; set env.chat to auto, or to none"
            log.warning(words, self.tokenizer)
        names = range(min(len(self.spec().tasks), _TRIED_TASKS))
        errors = self._tried([(task, seed) for task in names for seed in range(_TRIED_PROMPTS)])
        tried, refused = len(names) * _TRIED_PROMPTS, [str(e) for e in errors if isinstance(e, EpisodeRefused)]
        count = f"{len(refused)} of the first {tried} prompts"
        if 2 * len(refused) > tried:
            raise ConfigError(f"{refused[0]} ({count} are like that)")
        if refused:
            log.warning("%s are set aside, as others like them will be: %s", count, refused[0])

    def check_expert(self, episodes: Sequence[tuple[int, int]]) -> None:
        """ConfigError: the expert's first message of each of these episodes exceeds `max_new_tokens`."""
        longest: MessageTooLong | None = None
        for error in self._tried(episodes, expert=True):
            if isinstance(error, MessageTooLong):
                longest = error if longest is None or error.tokens > longest.tokens else longest
            elif not isinstance(error, EpisodeRefused):
                return  # it can be given, or the error is reported when it is played
        if longest is not None:
            raise ConfigError(f"{longest}, or set demonstrations and supervised to null")

    def _tried(self, episodes: Sequence[tuple[int, int]], *, expert: bool = False) -> Iterator[Exception | None]:
        """How beginning each episode, or the expert's first message there, failed; None where it did not."""
        batch = self.build(1)
        with closing(batch):
            for task, seed in episodes if batch.traits.expert or not expert else ():
                try:
                    batch.reset([0], [task], [seed])
                    if expert:
                        batch.expert_actions([0])
                except RowsFailed as failed:
                    yield failed.errors[0]
                else:
                    yield None

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once per process."""
        chat = self.open_chat()
        return self._plain_tokenizer() if chat is None else chat.tokenizer

    def open_chat(self) -> Chat | None:
        """The chat template with its tokenizer, loaded once per process; None for plain text."""
        return None if self.chat == "none" else open_chat(self.tokenizer, self.chat, self._plain_tokenizer())

    def _plain_tokenizer(self) -> Tokenizer:
        if self.tokenizer == CHARACTERS:
            return character_tokenizer(self.alphabet)
        return folder_tokenizer(self.tokenizer)

    def _stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ids = list(tokenizer.ends)
        for text in self.stops:
            found = [] if tokenizer.lacking(text) else tokenizer.encode(text)
            if len(found) != 1:
                raise ConfigError(
                    f"env.tokenizer = {self.tokenizer}: {text!r}, which ends a message here, is {len(found)} tokens of "
                    f"{tokenizer.origin}; use the tokenizer characters"
                )
            ids += found
        return tuple(ids)


def enclosed(text: str, opening: str, closing: str) -> Iterator[str]:
    """The parts of a text between an opening mark and the next closing mark, in order.

    Takes linear time on any message. The work of a regular expression such as `<python>(.*?)</python>` grows with the
    square of the number of unclosed marks.
    """
    first = text.find(opening)
    while first >= 0 and (end := text.find(closing, first + len(opening))) >= 0:
        yield text[first + len(opening) : end]
        first = text.find(opening, end + len(closing))


def draw_apart(
    seed: int, draw: Callable[[Random], _Drawn], prompt_of: Callable[[_Drawn], str] = attrgetter("prompt")
) -> _Drawn:
    """The first draw whose `prompt` belongs to the seed's side: evaluation if the seed has `HELD_OUT`, else training.

    A hash assigns one prompt in eight to evaluations, so no evaluation prompt occurs in training, whatever the seeds.
    prompt_of: the prompt of a draw, by default its attribute. ConfigError: no draw is on that side.
    """
    held_out, random = bool(seed & HELD_OUT), Random(seed)
    for _ in range(_DRAWS):
        found = draw(random)
        if is_held_out(prompt_of(found)) == held_out:
            return found
    side = "evaluations" if held_out else "training"
    raise ConfigError(f"env: none of {_DRAWS} prompts is on the side of {side}; give the task more prompts")


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % _APART == 0
