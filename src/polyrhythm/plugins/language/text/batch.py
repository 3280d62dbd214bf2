"""Env batch of conversations: tokenization, turns, length limits, and replies that are prepared in advance."""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import definition_place
from polyrhythm.envs.base import EnvTraits, EpisodeRefused, RowNumbers, RowsFailed, StepResult
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.language.text.chat import Chat, ChatTurns, Prompt
from polyrhythm.plugins.language.text.conversation import (
    Awaited,
    Conversation,
    FullConversation,
    Reply,
    conversation_traits,
)
from polyrhythm.plugins.language.text.tokenizers import Tokenizer, begin, encodable, encode_after
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.finite import as_number
from polyrhythm.specs.spaces import Aggregate

log = logging.getLogger(__name__)


#: Metrics of every text environment, each with the aggregation over an episode; it adds its own.
STANDARD_METRICS: Mapping[str, Aggregate] = {"message_tokens": "sum", "turns": "sum", "cut": "max"}


class MessageTooLong(EpisodeRefused):
    """The expert's message exceeds the limit. tokens: its length, end token included."""

    def __init__(self, limit: int, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(
            f"env.max_new_tokens = {limit}: the expert's message has {tokens} tokens with its end; raise it to {tokens}"
        )


class TextBatch:
    """Rows that reset and step independently. A row's context is its prompt, its messages as sampled, and the replies:
    model output is never tokenized again. metrics: names of the environment's metrics; kind: its type, for errors."""

    def __init__(
        self,
        spec: EnvSpec,
        traits: EnvTraits,
        tokenizer: Tokenizer,
        chat: Chat | None,
        conversations: Sequence[Conversation],
        metrics: Collection[str],
        kind: str,
    ) -> None:
        self.spec, self.rows, self._type = spec, len(conversations), kind
        self.tokenizer, self._chat = tokenizer, chat
        self._limit = spec.observation["tokens"].shape[0]
        self._own_metrics = metrics
        self._chats: dict[int, ChatTurns] = {}  # by row, with a chat template
        self.conversations = cast(Sequence[FullConversation], conversations)
        self.traits = replace(traits, expert=conversation_traits(conversations[0]).expert)
        self._prepared = PreparedMessages(conversations)
        self._tokens = np.zeros((self.rows, self._limit), np.int32)
        self._length = np.zeros(self.rows, np.int32)
        self._turn = np.zeros(self.rows, np.int32)
        self._stops = np.array(self.spec.action.stops)
        self._overflowed = self._replaced = False  # whether the warning was logged
        self._said: list[list[str | NDArray[Any]]] = [[] for _ in conversations]  # ids of prompt, messages and replies

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        errors: dict[int, Exception] = {}
        for row, task, seed in zip(map(int, rows), tasks, seeds, strict=True):
            self._prepared.forget(row)
            try:
                prompt = self.conversations[row].begin(int(task), int(seed))
                self._check_prompt(prompt, self.conversations[row])
                ids = self._begun(row, prompt, f"the prompt of task {self.spec.tasks[task].name}, seed {seed},")
            except PolyrhythmError:
                raise
            except Exception as error:  # noqa: BLE001 - of the user's code: the row fails alone
                errors[row] = error
                continue
            self._length[row] = self._turn[row] = self._tokens[row] = 0
            self._said[row] = [np.array(ids)]
            self._append(row, ids)
        if errors:
            raise RowsFailed(errors)

    def _check_prompt(self, prompt: object, conversation: Conversation) -> None:
        """ValueError: `begin` returned neither a text nor complete turns."""
        needed = ("role", "content") if self._chat is not None else ("content",)
        for turn in [] if isinstance(prompt, str) else prompt if isinstance(prompt, Sequence) else [prompt]:
            if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in needed):
                where = definition_place(conversation.begin)
                raise ValueError(
                    f"env.type = {self._type}: its begin{where} returned the turn {turn!r:.80}; give each turn a role "
                    "and a content, which are texts, as in {'role': 'user', 'content': '…'}"
                )

    def _begun(self, row: int, prompt: Prompt, what: str) -> list[int]:
        """Ids of a prompt. EpisodeRefused: it cannot be shown whole. what: describes the prompt in errors."""
        try:
            if self._chat is not None and prompt:
                self._chats[row] = ChatTurns(self._chat, prompt)
                prompt = self._chats[row].shown
            text = prompt if isinstance(prompt, str) else "".join(f"{turn['content']}\n" for turn in prompt)
            ids = begin(self.tokenizer, text)
        except ValueError as error:
            raise EpisodeRefused(f"{what} cannot be encoded: {error}") from error
        if not ids:
            raise EpisodeRefused(f"{what} is empty; give it a text, from which the model can begin")
        if len(ids) > self._limit:
            raise EpisodeRefused(
                f"env.max_prompt_tokens = {self._limit}: {what} has {len(ids)} tokens; raise it to that or more (a "
                "resumed run keeps it), or shorten the prompts"
            )
        return ids

    def _append(self, row: int, ids: Sequence[int]) -> bool:
        """Append ids to the row's context. If they do not fit, warn once and return False."""
        first, end = int(self._length[row]), int(self._length[row]) + len(ids)
        if end <= self._limit:
            self._tokens[row, first:end] = ids
            self._length[row] = end
            return True
        if not self._overflowed:
            self._overflowed = True
            words = (
                "env.max_prompt_tokens = %d: a conversation has %d tokens after message %d, so it ends there; raise "
            )
            words += "it if this is not meant"
            log.warning(words, self._limit, end, self._turn[row])
        return False

    def begin_step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> None:
        for row, message, whole in self._messages(rows, actions):
            if whole and self._prepared.expects(row):
                self._prepared.prepare(row, self._text(message))

    def drop_step(self, rows: RowNumbers) -> None:
        for row in map(int, rows):
            self._prepared.drop(row)

    def waits(self, rows: RowNumbers) -> bool:
        return self._prepared.waits(map(int, rows))

    def fileno(self) -> int:
        return self._prepared.fileno()

    def _messages(self, rows: RowNumbers, actions: NDArray[np.generic]) -> list[tuple[int, NDArray[Any], bool]]:
        """Row, message up to its end, and whether it has one, of actions [n,C,1]."""
        ids = np.asarray(actions)[:, :, 0]
        stop = np.isin(ids, self._stops)
        whole = np.asarray(stop.any(1))
        lengths = np.where(whole, stop.argmax(1) + 1, ids.shape[1])
        return [(int(row), ids[i, : lengths[i]], bool(whole[i])) for i, row in enumerate(rows)]

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        """Execute one message per row: actions [n,C,1]."""
        messages = self._messages(rows, actions)
        n, whole = len(messages), np.array([one[2] for one in messages], bool)
        lengths = np.array([len(one[1]) for one in messages], np.intp)
        reward = np.zeros(n, np.float32)
        terminated, truncated, success = (np.zeros(n, bool) for _ in range(3))
        own = {name: np.where(whole, np.nan, 0.0) for name in self._own_metrics}
        self.begin_step(rows, actions)
        prepared = {row: self._prepared.take(row) for row, _, ends in messages if ends}
        errors = {row: error for row, error in prepared.items() if error is not None}
        for i, (row, message, ends) in enumerate(messages):
            self._turn[row] += 1
            if row in errors:
                continue
            try:
                reply = self._replied(row, message) if ends else Reply(done=False)
                shown = [] if reply.done or not ends else self._shown(row, message, reply.text)
                self._said[row] += (message.copy(), reply.text if reply.done else np.array(shown, np.int64))
                reward[i], terminated[i], success[i] = reply.reward, reply.done, reply.success
                for name, value in reply.metrics.items():
                    own[name][i] = value
                if not reply.done:
                    fits = ends and self._append(row, [*message.tolist(), *shown])
                    terminated[i] = not fits  # with what it has earned: what is observed next has no part of it
                    truncated[i] = fits and self._turn[row] >= self.spec.max_steps
            except PolyrhythmError:
                raise
            except Exception as error:  # noqa: BLE001 - of the user's code: the row fails alone
                errors[row] = error
        metrics = {
            "message_tokens": lengths.astype(np.float64),
            "turns": np.ones(n),
            "cut": (~whole).astype(np.float64),
            **own,
        }
        executed = np.arange(self.spec.chunk) < lengths[:, None]
        result = StepResult(reward, terminated, truncated, success, metrics, executed)
        if errors:
            raise RowsFailed(errors, result)
        return result

    def _text(self, message: NDArray[Any]) -> str:
        """A message as text, without the leading spaces that a chat template writes."""
        text = self.tokenizer.decode(message.tolist())
        return text if self._chat is None else text.removeprefix(self._chat.lead)

    def _replied(self, row: int, message: NDArray[Any]) -> Reply:
        conversation = self.conversations[row]
        reply = conversation.reply(self._text(message))
        wrong = ""
        if not isinstance(reply, Reply):
            wrong = f"returned {reply!r:.80}; return a Reply whose reward is a finite number"
        elif not math.isfinite(as_number(reply.reward)):
            wrong = f"returned a reward of {reply.reward!r}; return a Reply whose reward is a finite number"
        elif unknown := reply.metrics.keys() - set(self._own_metrics):
            wrong = f"has the metrics {sorted(unknown)}; declare them in the settings"
        if wrong:
            raise ValueError(f"its reply{definition_place(conversation.reply)} {wrong}")
        return reply

    def _shown(self, row: int, message: NDArray[Any], reply: str) -> list[int]:
        """Ids of a reply, with unencodable characters replaced: a policy may have had a tool print them. With a chat
        template, of the text after the message, without an end that was already sampled."""
        text = reply if self._chat is None else self._chats[row].reply(reply)
        try:
            ids = self.tokenizer.encode(text)
        except ValueError:
            plain = encodable(self.tokenizer, text)
            if not self._replaced:
                self._replaced = True
                words = "a reply has what is without an id in %s, so it is shown otherwise: %.80r, not %.80r; like "
                words += "replies come without a warning"
                log.warning(words, self.tokenizer.origin, plain, text)
            ids = self.tokenizer.encode(plain)
        return ids[1:] if self._chat is not None and ids[:1] == [message[-1]] else ids

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        index = np.asarray(rows, np.intp)
        out["tokens"][:], out["length"][:], out["turn"][:] = self._tokens[index], self._length[index], self._turn[index]

    def transcript(self, row: int) -> str:
        """The row's context as text: prompt, messages and replies, without the tokenizer's prefix."""
        first = len(self.tokenizer.start)
        return self.tokenizer.decode(self._tokens[row, first : self._length[row]].tolist())

    def texts(self, row: int) -> tuple[str, ...]:
        """The decoded context, a cut last message, and replies that the model did not see."""
        decode = self.tokenizer.decode
        return tuple(said if isinstance(said, str) else decode(said.tolist()) for said in self._said[row])

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.int64]:
        """The expert's next message of each row: [n,C,1], with an end-of-text token unless it has a stop of its own.
        EpisodeRefused, for a row: the message is too long or cannot be encoded."""
        found = np.full((len(rows), self.spec.chunk, 1), self.tokenizer.ends[0], np.int64)
        refused: dict[int, Exception] = {}
        for i, row in enumerate(map(int, rows)):
            message = self.conversations[row].expert()
            before, lead = ("", "") if self._chat is None else (self._chats[row].shown, self._chat.lead)
            try:
                ids = encode_after(self.tokenizer, before, lead + message)
            except ValueError as error:
                refused[row] = EpisodeRefused(f"the expert's message cannot be encoded: {error}")
                continue
            ids += [] if ids and ids[-1] in self.spec.action.stops else [self.tokenizer.ends[0]]
            if len(ids) > self.spec.chunk:
                refused[row] = MessageTooLong(self.spec.chunk, len(ids))
            else:
                found[i, : len(ids), 0] = ids
        if refused:
            raise RowsFailed(refused, found)
        return found

    def close(self) -> None:
        for conversation in self.conversations:
            if conversation_traits(conversation).close:
                conversation.close()
        self._prepared.close()


class PreparedMessages:
    """Messages passed to conversations in advance, and the descriptors on which their replies wait.

    Invariant: a row is awaited, and its descriptor watched, only between `prepare` and `take`, `drop` or `forget`.
    """

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self.conversations = cast(Sequence[FullConversation], conversations)
        self._traits = list(map(conversation_traits, conversations))
        self._errors: dict[int, Exception | None] = {}  # of rows that have prepared
        self._awaited: dict[int, Awaited] = {}
        self._poll = select.epoll()
        self.close, self.fileno = self._poll.close, self._poll.fileno

    def expects(self, row: int) -> bool:
        """Whether the row's conversation prepares replies and has not received its message."""
        return row not in self._errors and self._traits[row].prepare

    def prepare(self, row: int, message: str) -> None:
        conversation = self.conversations[row]
        self._errors[row] = None
        try:
            conversation.prepare(message)
            awaited = conversation.awaits() if self._traits[row].awaits else None
            if awaited is not None:
                self._poll.register(awaited.fileno, select.EPOLLIN)
                self._awaited[row] = awaited
        except PolyrhythmError:
            raise
        except Exception as error:  # noqa: BLE001 - of the user's code: the row fails alone
            self._errors[row] = error
            self._give_up(row)

    def waits(self, rows: Iterable[int]) -> bool:
        """Whether a reply of these rows is awaited and its deadline has not passed."""
        ready = {number for number, _ in self._poll.poll(0)}
        for row in [row for row, awaited in self._awaited.items() if awaited.fileno in ready]:
            self._end(row)
        now = time.monotonic()
        return any(row in self._awaited and now < self._awaited[row].deadline for row in rows)

    def take(self, row: int) -> Exception | None:
        """Stop waiting because the row replies now; return the exception that its preparation raised, or None."""
        error = self._errors.get(row)
        self.forget(row)
        return error

    def drop(self, row: int) -> None:
        """Stop waiting because the row will not reply; its conversation cancels the preparation."""
        if row in self._errors:
            self.forget(row)
            self._give_up(row)

    def forget(self, row: int) -> None:
        self._errors.pop(row, None)
        if row in self._awaited:
            self._end(row)

    def _give_up(self, row: int) -> None:
        if not self._traits[row].drop:
            return
        try:
            self.conversations[row].drop()
        except PolyrhythmError:
            raise
        except Exception:
            log.warning("row %d: the conversation's drop raised", row, exc_info=True)

    def _end(self, row: int) -> None:
        self._poll.unregister(self._awaited.pop(row).fileno)
