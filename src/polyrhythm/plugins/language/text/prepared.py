"""Messages that conversations were told beforehand, and what their replies wait for.

Invariant: a row's reply is awaited only between `tell` and `take`, `drop` or `forget`, and its descriptor watched.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable, Sequence
from typing import cast

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.language.text.base import Awaited, Conversation, FullConversation, conversation_traits

log = logging.getLogger(__name__)


class PreparedMessages:
    """Of the rows of a batch. Closing it is for the batch to do."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = cast(Sequence[FullConversation], conversations)
        self._traits = list(map(conversation_traits, conversations))
        self._told: dict[int, Exception | None] = {}
        self._awaited: dict[int, Awaited] = {}
        self._rows: dict[int, int] = {}  # by descriptor
        self._poll = select.epoll()
        self.close, self.fileno = self._poll.close, self._poll.fileno

    def expects(self, row: int) -> bool:
        """Whether the row's conversation prepares replies, and was not told its message yet."""
        return row not in self._told and self._traits[row].prepare

    def tell(self, row: int, message: str) -> None:
        """Have the row's conversation prepare its reply, where one is expected."""
        conversation = self._conversations[row]
        self._told[row] = None
        try:
            conversation.prepare(message)
            awaited = conversation.awaits() if self._traits[row].awaits else None
            if awaited is not None:
                self._poll.register(awaited.fileno, select.EPOLLIN)
        except PolyrhythmError:
            raise
        except Exception as error:  # noqa: BLE001 - of the user's code: the row fails alone
            self._told[row] = error
            self._give_up(row)
            return
        if awaited is not None:
            self._awaited[row], self._rows[awaited.fileno] = awaited, row

    def waits(self, rows: Iterable[int]) -> bool:
        """Whether the reply of one of these rows is awaited, and not for too long."""
        for number, _ in self._poll.poll(0):
            self._end(self._rows[number])
        now = time.monotonic()
        return any(row in self._awaited and now < self._awaited[row].deadline for row in rows)

    def take(self, row: int) -> Exception | None:
        """The row is about to reply: what its preparation raised, if anything."""
        error = self._told.get(row)
        self.forget(row)
        return error

    def drop(self, row: int) -> None:
        """The row will not reply: its conversation gives up what it prepared."""
        if row in self._told:
            self.forget(row)
            self._give_up(row)

    def forget(self, row: int) -> None:
        """Nothing of the row is awaited any more."""
        self._told.pop(row, None)
        if row in self._awaited:
            self._end(row)

    def _give_up(self, row: int) -> None:
        if not self._traits[row].drop:
            return
        try:
            self._conversations[row].drop()
        except PolyrhythmError:
            raise
        except Exception:
            log.warning("row %d: the conversation's drop raised", row, exc_info=True)

    def _end(self, row: int) -> None:
        number = self._awaited.pop(row).fileno
        del self._rows[number]
        self._poll.unregister(number)
