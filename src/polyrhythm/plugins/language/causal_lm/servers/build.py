"""Builds the engine at a server from its settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.sampling import Sampling
from polyrhythm.plugins.language.causal_lm.servers.client import ServerClient
from polyrhythm.plugins.language.causal_lm.servers.engine import ServerEngine, ServerHandling
from polyrhythm.plugins.language.causal_lm.servers.openai import OpenAiProtocol, WeightCalls
from polyrhythm.plugins.language.causal_lm.servers.protocol import ServerProtocol
from polyrhythm.plugins.language.causal_lm.servers.sglang import SglangProtocol

if TYPE_CHECKING:
    from polyrhythm.plugins.language.causal_lm.engine_settings import OpenAiSettings, SglangSettings


def engine_at_server(
    how: SglangSettings | OpenAiSettings,
    network: CausalNetwork,
    sampling: Sampling,
    stops: Sequence[int],
    *,
    capacity: int,
    length: int,
) -> ServerEngine:
    """Create the engine for a server. RunHalted: the server does not answer."""
    protocol = _protocol_of(how, network, sampling, stops)
    handling = ServerHandling(how.deadline_s, how.folder, how.tolerance)
    return ServerEngine(network, sampling, stops, handling, protocol, capacity=capacity, length=length)


def ask_server(
    how: SglangSettings | OpenAiSettings, network: CausalNetwork, sampling: Sampling, stops: Sequence[int], length: int
) -> None:
    """Check the server. RunHalted: it does not answer, or does not accept sequences of `length` tokens."""
    _protocol_of(how, network, sampling, stops).begin(length)


def _protocol_of(
    how: SglangSettings | OpenAiSettings, network: CausalNetwork, sampling: Sampling, stops: Sequence[int]
) -> ServerProtocol:
    config: Any = network.model.config
    what = (sampling, stops, range(sampling.choices, config.vocab_size), how.load_s)
    if how.type == "sglang":
        return SglangProtocol(ServerClient(how.url, how.deadline_s, how.retries, "an sglang server"), *what)
    kind = "a server of OpenAI's protocol"
    client = ServerClient(how.url, how.deadline_s, how.retries, kind, _headers(how.key_variable))
    return OpenAiProtocol(client, *what, model=how.model, calls=WeightCalls(**dict(how.weights)))


def _headers(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    if not (key := os.environ.get(variable)):
        raise RunHalted(
            f"policy.engine.key_variable = {variable}: the environment has no such variable; set it to the server's key"
        )
    return {"Authorization": f"Bearer {key}"}
