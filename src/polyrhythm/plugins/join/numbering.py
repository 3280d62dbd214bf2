"""Messages that arrive once and in order although connections break.

Each end numbers what it says from 1, and keeps it until it knows that the other end has it. After a break the ends tell
each other the last number that came, and what lies after it is sent again.

Invariant: every message is taken once, in its order; at most what was said since the last sign of life is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from polyrhythm.runtime.transport.drops import UnfitMessage


class Numbering:
    """One end. sent, received: the last numbers; kept: messages that the other end may lack."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._kept: deque[tuple[int, bytes]] = deque()

    def next(self) -> int:
        """The number of the next message."""
        return self.sent + 1

    def keep(self, content: bytes) -> None:
        """The next message is this, packed with `next`."""
        self.sent += 1
        self._kept.append((self.sent, content))

    def note(self, received: int) -> None:
        """The other end has everything up to this number. UnfitMessage: it cannot."""
        if not 0 <= received <= self.sent:
            raise UnfitMessage("impossible", f"message {received} is said to have come; {self.sent} were sent")
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()

    def take(self, number: int) -> bool:
        """Whether a message that comes now is the next; False if it came before. UnfitMessage: one before it is
        missing."""
        if number > self.received + 1:
            raise UnfitMessage("impossible", f"message {number} comes after message {self.received}")
        if number <= self.received:
            return False
        self.received = number
        return True

    def kept(self) -> Iterator[bytes]:
        """What the other end may lack, in order."""
        return (content for _, content in self._kept)

    def __len__(self) -> int:
        return len(self._kept)
