"""An engine in vLLM, in the generator's own process: requests are added and aborted one by one, weights change between
two of its steps, in place and from memory.

Tokens are drawn by `vllm_sampling`, so that they and their log-probs are those of the native engine up to rounding.
Keys and values of running requests are kept when weights change, as in the native engine, or made anew (`refresh`).
Requests share whole blocks of keys and values with those before them that begin alike, under the same weights only:
every change of weights salts the hash of blocks anew.

Invariant: a request is in `_runs` from `add` until it has finished or was aborted, and vLLM has it exactly as long.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import COMPARED, compared_prompt, worst_difference
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.sampling import Sampling
from polyrhythm.plugins.language.causal_lm.vllm_sampling import EXTRA, BatchSampler, Drawn, Draws, processor_class
from polyrhythm.plugins.pretrained.adapters import is_adapter, plain_name
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit

#: What vLLM reads at its import: its core in this process, with logits processors of version 1; threads are the
#: generator's; nothing is reported to anybody.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Quiet unless the user has set it.
_LEVEL = "VLLM_LOGGING_LEVEL"
#: Positions of a block of keys and values: what requests share is whole blocks.
BLOCK = 32


#: Engines of this process. One that is collected ends the process groups of all, so none is before the process ends.
_STARTED: list[Any] = []


class VllmStart(NamedTuple):
    """cache_gib: memory of keys and values; compiles: whether vLLM compiles the model; dtype: of weights and keys;
    tolerance: of its log-probs against the network's."""

    cache_gib: float = 1.0
    compiles: bool = True
    dtype: str = "float32"
    tolerance: float = 0.1


class Answer(NamedTuple):
    """A request that has ended by itself. cached: tokens of its prompt whose keys and values were there."""

    name: str
    drawn: Drawn
    cached: int


class VllmModel:
    """vLLM with a copy of a network's weights. Requests have names, each used once.

    After each change of the weights a request of the model's own runs beside the others, and its log-probs must be the
    network's. checks: so many have ended; check_difference: sum of the largest difference of each.
    """

    def __init__(
        self, network: CausalNetwork, sampling: Sampling, how: VllmStart, *, capacity: int, length: int
    ) -> None:
        """RunHalted: vLLM does not start with this model, or its log-probs are not the network's, in one sentence."""
        self.sampler = BatchSampler(sampling)
        os.environ.update(_ENVIRONMENT)
        os.environ.setdefault(_LEVEL, "ERROR")
        self._engine = self._start(network, how, capacity, length)
        _STARTED.append(self._engine)
        self._named = 0
        self._weights = 0  # changes of them
        self.checks, self.check_difference = 0, 0.0
        self._network, self._tolerance = network, how.tolerance
        self._check: str | None = None  # its request, until it has ended
        self._reload(network, -1)
        self._prove()

    def _start(self, network: CausalNetwork, how: VllmStart, capacity: int, length: int) -> Any:
        config: Any = network.model.config
        config.architectures = [type(network.model).__name__]
        with tempfile.TemporaryDirectory(prefix="polyrhythm-vllm-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at import, about things that nobody here can change
            config.save_pretrained(folder)
            try:
                from vllm import EngineArgs
                from vllm.v1.engine.llm_engine import LLMEngine

                return LLMEngine.from_engine_args(
                    EngineArgs(
                        model=folder,
                        load_format="dummy",
                        skip_tokenizer_init=True,
                        generation_config="vllm",
                        dtype=how.dtype,
                        max_model_len=length,
                        max_num_seqs=capacity + 1,  # one to compare
                        block_size=BLOCK,
                        kv_cache_memory_bytes=int(how.cache_gib * 2**30),
                        enable_prefix_caching=True,
                        async_scheduling=False,
                        enforce_eager=not how.compiles,
                        logits_processors=[processor_class(self.sampler)],
                        disable_log_stats=True,
                    )
                )
            except Exception as error:  # vLLM and pydantic raise many kinds
                raise RunHalted(f"policy.engine.type = vllm: it did not start: {_first_line(error)}") from error

    def _prove(self) -> None:
        """Continue a short prompt, which fails where vLLM lacks a part for this model, and compare."""
        self._begin_check()
        try:
            while self._check is not None:
                self.step()
        except RunHalted:
            raise
        except Exception as error:  # whatever the missing part raises
            raise RunHalted(f"policy.engine.type = vllm: it cannot run this model: {_first_line(error)}") from error

    def _begin_check(self) -> None:
        """Have a short prompt continued beside the requests; `step` compares."""
        if self._check is not None:
            self.abort(self._check)
        self._check = self.add(compared_prompt(self.sampler.sampling.choices), (), COMPARED, Draws(0, False))

    def _compare(self, found: Drawn) -> None:
        """RunHalted: the log-probs are not those of the network."""
        prompt = compared_prompt(self.sampler.sampling.choices)
        worst = worst_difference(self._network, self.sampler.sampling, prompt, found.output, found.logprobs)
        self.checks += 1
        self.check_difference += worst
        if worst > self._tolerance:
            raise RunHalted(
                f"policy.engine.type = vllm: its log-probs differ from this model's by {worst:.3g}, "
                f"{self._tolerance:g} is allowed (policy.engine.tolerance); use float32 (policy.engine.dtype), or "
                "engine native"
            )

    def load(self, network: CausalNetwork, version: int = -1) -> None:
        """Write the network's weights over those here, in place, from memory. What is cached of the older ones is
        shared with no request that is added from here on. The network keeps them until the next call."""
        self._reload(network, version)
        self._begin_check()

    def _reload(self, network: CausalNetwork, version: int) -> None:
        self._network, self.sampler.version = network, version
        self._weights += 1
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(network.model)})

    def add(self, tokens: Sequence[int], stops: Sequence[int], most: int, draws: Draws) -> str:
        """Have `tokens` continued by at most `most` of them, up to one of `stops`: the request's name."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._named += 1
        name = str(self._named)
        params = SamplingParams(
            temperature=0.0,  # vLLM takes the one choice that the sampler has left
            max_tokens=most,
            stop_token_ids=list(stops),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={EXTRA: (name, draws)},
        )
        self._engine.add_request(name, tokens_input(list(tokens), cache_salt=str(self._weights)), params)
        return name

    def abort(self, name: str) -> Drawn:
        """What was drawn; the request is gone."""
        self._engine.abort_request([name])
        return self.sampler.take(name)

    @property
    def checking(self) -> bool:
        """Whether the log-probs of the present weights have still to be compared."""
        return self._check is not None

    def step(self) -> list[Answer]:
        """One of vLLM's steps: the requests that it ended. RunHalted: its log-probs are not the network's."""
        ended = [
            Answer(output.request_id, self.sampler.take(output.request_id), output.num_cached_tokens or 0)
            for output in self._engine.step()
            if output.finished
        ]
        check = next((answer for answer in ended if answer.name == self._check), None)
        if check is None:
            return ended
        self._check = None
        self._compare(check.drawn)
        return [answer for answer in ended if answer is not check]


def _first_line(error: Exception) -> str:
    """What went wrong, without pydantic's heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
    return told.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".") + "; see docs/engines.md"


@torch.no_grad()
def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by their names in its folder, adapters added to the matrices that they adapt."""
    adapted = {
        f"{plain_name(path)}.weight": part
        for path, part in model.named_modules()
        if hasattr(part, "base_layer") and hasattr(part, "get_delta_weight")
    }
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            continue
        plain = plain_name(name)
        part: Any = adapted.get(plain)
        yield plain, tensor if part is None else tensor + part.get_delta_weight("default").to(tensor.dtype)


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
