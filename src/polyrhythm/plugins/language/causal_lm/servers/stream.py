"""A request at a server, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.servers.client import Line, ServerLost
from polyrhythm.policies.engine import EngineRequest, Generated


@dataclass(slots=True)
class ServerStream:
    """A request at the server. version: of its weights; tokens, logprobs: since it began; reason: why it ended, ""
    before. error: what ended it otherwise. failures: lost connections in a row before it. prompt_tokens, shared_tokens:
    of its prompt, and those that the server had computed before. line: its connection."""

    request: EngineRequest
    name: str
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    error: RunHalted | None = None
    failures: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    line: Line = field(default_factory=Line)

    @property
    def prefix(self) -> list[int]:
        """Tokens of the answer that were there before the stream began."""
        return [] if self.request.prefix is None else self.request.prefix.tokens.tolist()

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.error is not None

    @property
    def lost(self) -> bool:
        """Its connection was lost, and it may go on."""
        return isinstance(self.error, ServerLost)

    def generated(self, *, finished: bool) -> Generated:
        """The prefix and what the stream has added."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        versions = np.full(len(self.tokens), self.version, np.int32)
        if (before := self.request.prefix) is not None:
            tokens = np.concatenate([before.tokens, tokens])
            logprobs = np.concatenate([before.logprobs, logprobs])
            versions = np.concatenate([before.versions, versions])
        return Generated(self.request.request_id, tokens, logprobs, versions, finished)
