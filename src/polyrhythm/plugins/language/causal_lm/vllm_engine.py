"""vLLM engine in the generator's process: requests are added and aborted one by one; weights change between two steps,
in place and from memory.

Tokens are drawn here, by a logits processor: vLLM's noise comes from a generator per request, which a resumed request
would restart, and its log-probs follow its own top-k and top-p. So each row of logits is processed and drawn as in the
native engine, whose tokens and log-probs these equal up to rounding, and vLLM is left one choice.

When weights change, keys and values of running requests are kept or recomputed (`refresh`), as in the native engine.
Requests share cached prefix blocks only under the same weights: every weight change salts the block hashes.

Invariant: a request is in `_runs`, and in vLLM, from `add` until it finishes or is aborted.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import (
    COMPARED,
    Sampling,
    compared_prompt,
    draw,
    process_logits,
    worst_difference,
)
from polyrhythm.plugins.language.causal_lm.engine_settings import VllmSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.pretrained.adapters import is_adapter, plain_name
from polyrhythm.policies import noise
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

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


#: Where vLLM carries what is ours of a request.
EXTRA = "polyrhythm"


class Draws(NamedTuple):
    """Sampling of one request. noise_key, greedy: as in `EngineRequest`; first: number of its prefix tokens."""

    noise_key: int
    greedy: bool
    first: int = 0


@dataclass(slots=True)
class Drawn:
    """Tokens drawn for a request. output: vLLM's own token list; logprobs, versions: one per token, and perhaps one
    more, for a token that vLLM dropped because the prompt was not read to its end."""

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def put(self, logprob: float, version: int) -> None:
        """Record the token that vLLM appends next; overwrites a dropped one."""
        kept = len(self.output)
        self.logprobs[kept:], self.versions[kept:] = [logprob], [version]


class _Row(NamedTuple):
    draws: Draws
    drawn: Drawn
    uniform: noise.UniformStream

    def next_uniform(self) -> float:
        return self.uniform.at(self.draws.first + len(self.drawn.output))


class BatchSampler:
    """Tracks vLLM's batch and draws one token per row. version: of the weights."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.version = -1
        self._drawn: dict[str, Drawn] = {}
        self._rows: dict[int, _Row] = {}
        self._greedy = torch.zeros(0, dtype=torch.bool)

    def follow(self, update: BatchUpdate | None) -> None:
        """Apply vLLM's batch update: removed, added and moved rows, in this order."""
        if update is None:
            return
        for row in update.removed:
            self._rows.pop(row, None)
        for row, params, _, output in update.added:
            name, draws = (params.extra_args or {})[EXTRA]
            drawn = self._drawn.setdefault(name, Drawn())
            drawn.output = output
            self._rows[row] = _Row(draws, drawn, noise.UniformStream(draws.noise_key))
        for source, target, direction in update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction.name == "SWAP":
                self._rows[source] = other
        self._greedy = torch.zeros(0, dtype=torch.bool)

    def take(self, name: str) -> Drawn:
        """Remove a finished request and return its draws."""
        found = self._drawn.pop(name, None) or Drawn()
        count = len(found.output)
        return Drawn(list(found.output), found.logprobs[:count], found.versions[:count])

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each of the rows 0..n-1 and mask all others in logits [n,V], in place."""
        rows = [self._rows[row] for row in range(len(logits))]
        if len(self._greedy) != len(rows):
            self._greedy = torch.tensor([row.draws.greedy for row in rows], device=logits.device)
        uniform = torch.tensor([row.next_uniform() for row in rows], device=logits.device)
        tokens, logprobs = draw(process_logits(logits, self.sampling), uniform, self._greedy)
        for row, logprob in zip(rows, logprobs.tolist(), strict=True):
            row.drawn.put(logprob, self.version)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)


def processor_class(sampler: BatchSampler) -> type[Any]:
    """The logits processor class for vLLM, defined here because its base class needs vLLM to be imported."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class OwnSampling(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: object) -> None:
            """Ignores vLLM's configuration and device."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            sampler.follow(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return sampler.draw(logits)

    return OwnSampling


class Answer(NamedTuple):
    """A request that finished by itself. cached: number of its prompt tokens found in the prefix cache."""

    name: str
    drawn: Drawn
    cached: int


class VllmModel:
    """vLLM with a copy of a network's weights. Request names are unique.

    After each weight change the model runs a check request beside the others, whose log-probs must equal the network's.
    checks: number of finished checks; check_difference: sum of their largest differences.
    """

    def __init__(
        self, network: CausalNetwork, sampling: Sampling, how: VllmSettings, *, capacity: int, length: int
    ) -> None:
        """RunHalted: vLLM does not start with this model, or its log-probs differ from the network's."""
        self.sampler = BatchSampler(sampling)
        os.environ.update(_ENVIRONMENT)
        os.environ.setdefault(_LEVEL, "ERROR")
        self._engine = self._start(network, how, capacity, length)
        _STARTED.append(self._engine)
        self._named = 0
        self._weights = 0  # number of weight changes
        self.checks, self.check_difference = 0, 0.0
        self._network, self._tolerance = network, how.tolerance
        self._check: str | None = None  # name of the running check request
        self._reload(network, -1)
        self._prove()

    def _start(self, network: CausalNetwork, how: VllmSettings, capacity: int, length: int) -> Any:
        config: Any = network.model.config
        config.architectures = [type(network.model).__name__]
        with tempfile.TemporaryDirectory(prefix="polyrhythm-vllm-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # import warnings that users cannot fix
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
                        max_num_seqs=capacity + 1,  # one for the check request
                        block_size=BLOCK,
                        kv_cache_memory_bytes=int(how.cache_gib * 2**30),
                        enable_prefix_caching=True,
                        async_scheduling=False,
                        enforce_eager=not how.compile,
                        logits_processors=[processor_class(self.sampler)],
                        disable_log_stats=True,
                    )
                )
            except Exception as error:  # vLLM and pydantic raise many types
                raise RunHalted(f"policy.engine.type = vllm: it did not start: {_first_line(error)}") from error

    def _prove(self) -> None:
        """Generate from a short prompt and compare; fails if vLLM lacks support for this model."""
        self._begin_check()
        try:
            while self._check is not None:
                self.step()
        except RunHalted:
            raise
        except Exception as error:  # whatever the missing part raises
            raise RunHalted(f"policy.engine.type = vllm: it cannot run this model: {_first_line(error)}") from error

    def _begin_check(self) -> None:
        """Start a check request beside the others; `step` compares its result."""
        if self._check is not None:
            self.abort(self._check)
        self._check = self.add(compared_prompt(self.sampler.sampling.choices), (), COMPARED, Draws(0, False))

    def _compare(self, found: Drawn) -> None:
        """RunHalted: the log-probs differ from the network's."""
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
        """Copy the network's weights over the model's, in place, from memory.

        Requests added from here on do not reuse the prefix cache of older weights. The network keeps its weights until
        the next call.
        """
        self._reload(network, version)
        self._begin_check()

    def _reload(self, network: CausalNetwork, version: int) -> None:
        self._network, self.sampler.version = network, version
        self._weights += 1
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(network.model)})

    def add(self, tokens: Sequence[int], stops: Sequence[int], most: int, draws: Draws) -> str:
        """Add a request that continues `tokens` by at most `most` tokens, up to one of `stops`; returns its name."""
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
        """Abort a request; returns its drawn tokens."""
        self._engine.abort_request([name])
        return self.sampler.take(name)

    @property
    def checking(self) -> bool:
        """Whether the check of the present weights is still running."""
        return self._check is not None

    def step(self) -> list[Answer]:
        """Run one vLLM step; return the requests that it finished. RunHalted: its log-probs differ from the
        network's."""
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
    """The error's message without pydantic's heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
    return told.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".") + "; see docs/engines.md"


@torch.no_grad()
def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under their checkpoint names, with adapters merged into the adapted matrices."""
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
    """An engine over `model`, which holds `network`'s weights. length: the longest sequence; stops: tokens that end
    one; refresh: recompute keys and values of unfinished requests after a weight change.

    prompt_tokens: prompt tokens, prefixes included, of finished requests; shared_tokens: those found in the prefix
    cache.
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
        """ValueError: there is no free row, the sequence is too long, or it would generate nothing."""
        refuse_unfit(request, self._runs, self.capacity, self._length)
        self._begin(request)

    def _begin(self, request: EngineRequest) -> None:
        done = [] if request.prefix is None else request.prefix.tokens.tolist()
        draws = Draws(request.noise_key, request.greedy, len(done))
        tokens = [*request.prompt.tolist(), *done]
        name = self._model.add(tokens, self._stops, request.max_new_tokens - len(done), draws)
        self._runs[request.request_id], self._names[name] = (name, request), request.request_id

    def abort(self, request_id: int) -> Generated:
        """KeyError: unknown request."""
        name, request = self._runs.pop(request_id)
        del self._names[name]
        return _generated(request, self._model.abort(name), finished=False)

    def weights_changed(self, version: int) -> None:
        cut = [self._cut(request) for _, request in list(self._runs.values())] if self._refresh else []
        self._model.load(self._network, version)
        for request in cut:
            self._begin(request)

    def _cut(self, request: EngineRequest) -> EngineRequest:
        """Abort a request; return the request that continues from its tokens."""
        found = self.abort(request.request_id)
        return request._replace(prefix=found if len(found.tokens) else None)

    def statistics(self) -> dict[str, int | float]:
        model = self._model
        checks = {"checks": model.checks, "check_difference": model.check_difference}
        return {"prompt_tokens": self.prompt_tokens, "shared_tokens": self.shared_tokens, **checks}

    # ------------------------------------------------------------ steps

    def step(self) -> list[Generated]:
        """Run one vLLM step: one token per request, or part of long prompts."""
        finished = []
        for answer in self._model.step() if self._runs or self._model.checking else ():
            _, request = self._runs.pop(self._names.pop(answer.name))
            before = 0 if request.prefix is None else len(request.prefix.tokens)
            self.prompt_tokens += len(request.prompt) + before
            self.shared_tokens += answer.cached
            finished.append(_generated(request, answer.drawn, finished=True))
        return finished


def _generated(request: EngineRequest, drawn: Drawn, *, finished: bool) -> Generated:
    progress = Progress.of(request)
    progress.tokens += drawn.output
    progress.logprobs += drawn.logprobs
    progress.versions += drawn.versions
    return progress.generated(finished=finished)
