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
from dataclasses import dataclass

from polyrhythm.policies.causal_lm.network import CausalNetwork
from polyrhythm.policies.causal_lm.vllm_model import Answer, VllmModel
from polyrhythm.policies.causal_lm.vllm_sampling import Draws
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit


@dataclass(slots=True)
class _Run(Progress):
    """A running request. name: in vLLM; begun: vLLM has sampled a token for it."""

    name: str = ""
    begun: bool = False


class VllmEngine:
    """An engine over `model`, which gets `network`'s weights. length: the longest sequence; stops: tokens that end one;
    refresh: new weights make keys and values of unfinished requests anew.

    prompt_tokens: of prompts that have begun, prefixes included; shared_tokens: those whose keys and values were there.
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
        self._runs: dict[int, _Run] = {}
        self._names: dict[str, int] = {}
        self._version = -1
        model.load(network)

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no room for it, in rows or in length, or it would generate nothing."""
        refuse_unfit(request, self._runs, self.capacity, self._length)
        self._begin(request)

    def _begin(self, request: EngineRequest) -> None:
        run = _Run.of(request)
        done = len(run.tokens)
        draws = Draws(request.noise_key, request.greedy, done)
        tokens = [*request.prompt.tolist(), *run.tokens]
        run.name = self._model.add(tokens, self._stops, request.max_new_tokens - done, draws)
        self._runs[request.request_id], self._names[run.name] = run, request.request_id

    def abort(self, request_id: int) -> Generated:
        """KeyError: there is no such request."""
        run = self._runs.pop(request_id)
        del self._names[run.name]
        self._model.abort(run.name)
        return run.generated(finished=False)

    def weights_changed(self, version: int) -> None:
        self._version = version
        cut = [self._cut(run) for run in list(self._runs.values())] if self._refresh else []
        self._model.load(self._network)
        for request in cut:
            self._begin(request)

    def _cut(self, run: _Run) -> EngineRequest:
        """Abort it; the request that goes on from its tokens."""
        found = self.abort(run.request.request_id)
        return run.request._replace(prefix=found if len(found.tokens) else None)

    # ------------------------------------------------------------ steps

    def step(self) -> list[Generated]:
        """A step of vLLM's: a token for each request, or a part of the prompts where they are long."""
        finished = []
        for answer in self._model.step() if self._runs else ():
            run = self._runs[self._names[answer.name]]
            self._take(run, answer)
            if answer.finished:
                finished.append(run.generated(finished=True))
                del self._runs[run.request.request_id], self._names[run.name]
        return finished

    def _take(self, run: _Run, answer: Answer) -> None:
        if not run.begun and answer.tokens:
            run.begun = True
            self.prompt_tokens += len(run.request.prompt) + len(run.tokens)
            self.shared_tokens += answer.cached
        run.tokens += answer.tokens
        run.logprobs += answer.logprobs
        run.versions += [self._version] * len(answer.tokens)
