"""An engine in vLLM, in the generator's own process: requests are added and aborted one by one, weights change between
two of its steps, in place and from memory.

Tokens are drawn by `vllm_sampling`, so that they and their log-probs are those of the native engine up to rounding.
Keys and values of running requests are kept when weights change, as in the native engine, or made anew (`refresh`).
Requests share whole blocks of keys and values with those before them that begin alike, under the same weights only:
every change of weights salts the hash of blocks anew.

Invariant: a request is in `_runs` from `add` until it has finished or was aborted, and vLLM has it exactly as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.vllm_model import VllmModel
from polyrhythm.plugins.language.causal_lm.vllm_sampling import Drawn, Draws
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit


class VllmEngine:
    """An engine over `model`, which has `network`'s weights. length: the longest sequence; stops: tokens that end one;
    refresh: new weights make keys and values of unfinished requests anew.

    prompt_tokens: of the prompts of requests that have finished, prefixes included; shared_tokens: those of them whose
    keys and values were there.
    """

    def __init__(
        self,
        model: VllmModel,
        network: CausalNetwork,
        stops: Sequence[int],
        *,
        capacity: int,
        length: int,
        refresh: bool = False,
    ) -> None:
        self.capacity = capacity
        self.prompt_tokens = self.shared_tokens = 0
        self._model, self._network, self._stops = model, network, tuple(stops)
        self._length, self._refresh = length, refresh
        self._runs: dict[int, tuple[str, EngineRequest]] = {}
        self._names: dict[str, int] = {}

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no room for it, in rows or in length, or it would generate nothing."""
        refuse_unfit(request, self._runs, self.capacity, self._length)
        self._begin(request)

    def _begin(self, request: EngineRequest) -> None:
        done = [] if request.prefix is None else request.prefix.tokens.tolist()
        draws = Draws(request.noise_key, request.greedy, len(done))
        tokens = [*request.prompt.tolist(), *done]
        name = self._model.add(tokens, self._stops, request.max_new_tokens - len(done), draws)
        self._runs[request.request_id], self._names[name] = (name, request), request.request_id

    def abort(self, request_id: int) -> Generated:
        """KeyError: there is no such request."""
        name, request = self._runs.pop(request_id)
        del self._names[name]
        return _generated(request, self._model.abort(name), finished=False)

    def weights_changed(self, version: int) -> None:
        cut = [self._cut(request) for _, request in list(self._runs.values())] if self._refresh else []
        self._model.load(self._network, version)
        for request in cut:
            self._begin(request)

    def _cut(self, request: EngineRequest) -> EngineRequest:
        """Abort it; the request that goes on from its tokens."""
        found = self.abort(request.request_id)
        return request._replace(prefix=found if len(found.tokens) else None)

    def statistics(self) -> dict[str, int | float]:
        model = self._model
        checks = {"checks": model.checks, "check_difference": model.check_difference}
        return {"prompt_tokens": self.prompt_tokens, "shared_tokens": self.shared_tokens, **checks}

    # ------------------------------------------------------------ steps

    def step(self) -> list[Generated]:
        """A step of vLLM's: a token for each request, or a part of the prompts where they are long."""
        finished = []
        for answer in self._model.step() if self._runs or self._model.checking else ():
            _, request = self._runs.pop(self._names.pop(answer.name))
            before = 0 if request.prefix is None else len(request.prefix.tokens)
            self.prompt_tokens += len(request.prompt) + before
            self.shared_tokens += answer.cached
            finished.append(_generated(request, answer.drawn, finished=True))
        return finished


def _generated(request: EngineRequest, drawn: Drawn, *, finished: bool) -> Generated:
    """The prefix and what was drawn since."""
    progress = Progress.of(request)
    progress.tokens += drawn.output
    progress.logprobs += drawn.logprobs
    progress.versions += drawn.versions
    return progress.generated(finished=finished)
