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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import (
    Sampling,
    compared_request,
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
#: Positions of a block of keys and values: what requests share is whole blocks.
BLOCK = 32
#: Engines of this process. One that is collected ends the process groups of all, so none is before the process ends.
_STARTED: list[Any] = []
#: Where vLLM carries our name of a request.
_EXTRA = "polyrhythm"


@dataclass(slots=True)
class Running(Progress):
    """A request in vLLM. tokens: until it ends, those of its prefix; output: vLLM's own list of the tokens after it;
    logprobs, versions: one per token, and perhaps one more, for a token that vLLM dropped because the prompt was not
    read to its end; cached: number of its prompt tokens found in the prefix cache."""

    output: list[int] = field(default_factory=list)
    cached: int = 0
    uniform: noise.UniformStream = field(init=False)

    def __post_init__(self) -> None:
        self.uniform = noise.UniformStream(self.request.noise_key)

    def next_uniform(self) -> float:
        return self.uniform.at(len(self.tokens) + len(self.output))

    def put(self, logprob: float, version: int) -> None:
        """Record the token that vLLM appends next; overwrites a dropped one."""
        kept = len(self.tokens) + len(self.output)
        self.logprobs[kept:], self.versions[kept:] = [logprob], [version]

    def end(self) -> None:
        self.tokens += self.output
        del self.logprobs[len(self.tokens) :], self.versions[len(self.tokens) :]


def processor_class(model: VllmModel) -> type[Any]:
    """The logits processor class for vLLM, defined here because its base class needs vLLM to be imported."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class OwnSampling(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: object) -> None:
            """Ignores vLLM's configuration and device."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            model.follow(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return model.draw(logits)

    return OwnSampling


class VllmModel:
    """vLLM with a copy of a network's weights. Request names are unique.

    After each weight change the model runs a check request beside the others, whose log-probs must equal the network's.
    checks: number of finished checks; check_difference: sum of their largest differences.
    """

    def __init__(
        self, network: CausalNetwork, sampling: Sampling, how: VllmSettings, *, capacity: int, length: int
    ) -> None:
        """RunHalted: vLLM does not start with this model, or its log-probs differ from the network's."""
        self.sampling, self._version = sampling, -1
        self._requests: dict[str, Running] = {}  # by name
        self._rows: dict[int, Running] = {}  # of vLLM's batch
        self._greedy = torch.zeros(0, dtype=torch.bool)  # of the rows; empty: they changed since it was built
        os.environ.update(_ENVIRONMENT)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # quiet
        self._engine = self._start(network, how, capacity, length)
        _STARTED.append(self._engine)
        self._named = 0
        self._weights = 0  # number of weight changes
        self.checks, self.check_difference = 0, 0.0
        self._network, self._tolerance = network, how.tolerance
        self._check: str | None = None  # name of the running check request
        self.load(network)
        try:  # whether vLLM can run this model
            while self._check is not None:
                self.step()
        except RunHalted:
            raise
        except Exception as error:  # whatever the missing part raises
            raise RunHalted(f"policy.engine.type = vllm: it cannot run this model: {_first_line(error)}") from error

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
                        logits_processors=[processor_class(self)],
                        disable_log_stats=True,
                    )
                )
            except Exception as error:  # vLLM and pydantic raise many types
                raise RunHalted(f"policy.engine.type = vllm: it did not start: {_first_line(error)}") from error

    def load(self, network: CausalNetwork, version: int = -1) -> None:
        """Copy the network's weights over the model's, in place, from memory, and start the check request. Later
        requests do not reuse the prefix cache of older weights. The network keeps its weights until the next call."""
        self._network, self._version = network, version
        self._weights += 1
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": plain_weights(network.model)})
        if self._check is not None:
            self.abort(self._check)
        self._check = self.add(compared_request(self.sampling.choices), ())

    def _compare(self, found: Running) -> None:
        """RunHalted: the log-probs differ from the network's."""
        worst = worst_difference(self._network, self.sampling, found)
        self.checks += 1
        self.check_difference += worst
        if worst > self._tolerance:
            raise RunHalted(
                f"policy.engine.type = vllm: its log-probs differ from this model's by {worst:.3g}, "
                f"{self._tolerance:g} is allowed (policy.engine.tolerance); use float32 (policy.engine.dtype), or "
                "engine native"
            )

    def add(self, request: EngineRequest, stops: Sequence[int]) -> str:
        """Add a request, which ends at one of `stops` at the latest; returns its name."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._named += 1
        name = str(self._named)
        run = self._requests[name] = Running.of(request)
        params = SamplingParams(
            temperature=0.0,  # vLLM takes the one choice that the sampler has left
            max_tokens=request.max_new_tokens - len(run.tokens),
            stop_token_ids=list(stops),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={_EXTRA: name},
        )
        tokens = tokens_input([*request.prompt.tolist(), *run.tokens], cache_salt=str(self._weights))
        self._engine.add_request(name, tokens, params)
        return name

    def abort(self, name: str) -> Running:
        self._engine.abort_request([name])
        return self._take(name)

    def _take(self, name: str) -> Running:
        found = self._requests.pop(name)
        found.end()
        return found

    def follow(self, update: BatchUpdate | None) -> None:
        """Apply vLLM's batch update: removed, added and moved rows, in this order."""
        if update is None:
            return
        self._greedy = torch.zeros(0, dtype=torch.bool)
        for row in update.removed:
            self._rows.pop(row, None)
        for row, params, _, output in update.added:
            self._rows[row] = self._requests[(params.extra_args or {})[_EXTRA]]
            self._rows[row].output = output
        for source, target, direction in update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction.name == "SWAP":
                self._rows[source] = other

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each of the rows 0..n-1 and mask all others in logits [n,V], in place."""
        rows = [self._rows[row] for row in range(len(logits))]
        if len(self._greedy) != len(rows):
            self._greedy = torch.tensor([row.request.greedy for row in rows], device=logits.device)
        uniform = torch.tensor([row.next_uniform() for row in rows], device=logits.device)
        tokens, logprobs = draw(process_logits(logits, self.sampling), uniform, self._greedy)
        for row, logprob in zip(rows, logprobs.tolist(), strict=True):
            row.put(logprob, self._version)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)

    @property
    def checking(self) -> bool:
        """Whether the check of the present weights is still running."""
        return self._check is not None

    def step(self) -> list[Running]:
        """Run one vLLM step; return the requests that it finished. RunHalted: its log-probs are wrong."""
        ended = []
        for output in self._engine.step():
            if not output.finished:
                continue
            run = self._take(output.request_id)
            run.cached = output.num_cached_tokens or 0
            if output.request_id == self._check:
                self._check = None
                self._compare(run)
            else:
                ended.append(run)
        return ended


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
    one; refresh: recompute keys and values of unfinished requests after a weight change; prompt_tokens: of finished
    requests, prefixes included; shared_tokens: those found in the prefix cache."""

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
        self._runs: dict[int, str] = {}  # names by request

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no free row, the sequence is too long, or it would generate nothing."""
        refuse_unfit(request, self._runs, self.capacity, self._length)
        self._runs[request.request_id] = self._model.add(request, self._stops)

    def abort(self, request_id: int) -> Generated:
        """KeyError: unknown request."""
        return self._model.abort(self._runs.pop(request_id)).generated(finished=False)

    def weights_changed(self, version: int) -> None:
        cut = [self._model.abort(name) for name in self._runs.values()] if self._refresh else []
        self._model.load(self._network, version)
        for run in cut:
            prefix = run.generated(finished=False) if run.tokens else None
            self._runs[run.request.request_id] = self._model.add(run.request._replace(prefix=prefix), self._stops)

    def statistics(self) -> dict[str, int | float]:
        model = self._model
        checks = {"checks": model.checks, "check_difference": model.check_difference}
        return {"prompt_tokens": self.prompt_tokens, "shared_tokens": self.shared_tokens, **checks}

    def step(self) -> list[Generated]:
        """Run one vLLM step: one token per request, or part of long prompts."""
        finished = []
        for run in self._model.step() if self._runs or self._model.checking else ():
            request = run.request
            del self._runs[request.request_id]
            self.prompt_tokens += len(request.prompt) + (0 if request.prefix is None else len(request.prefix.tokens))
            self.shared_tokens += run.cached
            finished.append(run.generated(finished=True))
        return finished
