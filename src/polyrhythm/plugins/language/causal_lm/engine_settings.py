"""Settings of the engines that generate tokens (docs/engines.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from polyrhythm.config.base import type_name
from polyrhythm.plugin import table
from polyrhythm.policies.base import SETTINGS

Url = Annotated[str, Field(pattern=r"^https?://(\[[0-9a-fA-F:]+\]|[^/:\s]+)(:[1-9][0-9]{0,4})?(/\S*)?$")]
#: A path at a server, or none.
Endpoint = Annotated[str, Field(pattern=r"^(/\S*)?$")]


class _Settings(BaseModel):
    model_config = SETTINGS


class NativeSettings(_Settings):
    """The engine on torch, in the generator's process."""

    type: Literal["native"] = "native"
    """Name of the engine."""


class VllmSettings(_Settings):
    """vLLM in the generator's process, which gets new weights from memory (docs/engines.md)."""

    type: Literal["vllm"] = "vllm"
    """Name of the engine."""
    cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Memory of its keys and values, which it takes at its start; what does not fit waits."""
    compile: bool = True
    """Let it compile the model, which takes time at its start and is faster afterwards."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Its weights, keys and values; in bfloat16 log-probs differ from those of the trainer."""
    tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Largest difference of its log-probs from those of the model here, compared after each change of the weights."""


class ServerSettings(_Settings):
    """What all servers of a model share, which get new weights over a folder."""

    url: Url
    """Its address, such as http://127.0.0.1:30000."""
    folder: str = ""
    """Folder for weights, which the server can read too; empty: the system's temporary one."""
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest silence of the server: before or in an answer, and where it pauses. Waiting in its queue counts."""
    load_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time in which it loads new weights."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Further attempts after a lost connection, 0.1, 0.2, 0.4, … seconds apart; then the run halts."""
    tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Largest difference of its log-probs from those of the model here, compared after each change of the weights."""


class SglangSettings(ServerSettings):
    """An sglang server of this model, which gets new weights over a folder (docs/engines.md)."""

    type: Literal["sglang"] = "sglang"
    """Name of the engine."""


class WeightSettings(_Settings):
    """How a server is given weights: paths that are posted to, empty where it has none. The defaults are vLLM's, whose
    server has them with VLLM_SERVER_DEV_MODE=1."""

    pause: Endpoint = "/pause?mode=abort"
    """Ends all answers, and begins none until `resume`."""
    load: Endpoint = "/collective_rpc"
    """Loads a folder in the layout of Hugging Face. Empty: its weights are fixed, and nothing can be trained."""
    load_body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}
    """What is posted there; {folder} and {version} are replaced."""
    name: Endpoint = "/update_weight_version"
    """Tells the server the version of its weights."""
    name_body: dict[str, Any] = {"new_version": "{version}"}
    """What is posted there."""
    named: Endpoint = "/weight_info"
    """Asked (GET) for that version, weight_version in its answer; empty: a server that starts anew while requests run
    may answer some with other weights."""
    resume: Endpoint = "/resume"
    """Begins answers again."""


class OpenAiSettings(ServerSettings):
    """A server of this model that speaks OpenAI's completions and returns tokens and log-probs, such as vLLM's
    (docs/engines.md)."""

    type: Literal["openai"] = "openai"
    """Name of the engine."""
    model: str = ""
    """The model's name at the server; empty: the first that it lists."""
    key_variable: str = ""
    """Environment variable that holds the server's key (Authorization: Bearer); empty: it needs none."""
    weights: WeightSettings = WeightSettings()
    """How it is given new weights."""


class AddedSettings(_Settings):
    """An engine that a plugin adds as an `engine`: a function of (network, sampling, stops, *, capacity, length)."""

    type: str
    """Name of the engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of the function."""


#: Tag of an engine that a plugin adds.
_ADDED = "a plugin's engine"


def _tag(value: Any) -> str:
    name = value.get("type", "native") if isinstance(value, dict) else type_name(value)
    return _ADDED if name in table("engine") else name


EngineSettings = Annotated[
    Annotated[NativeSettings, Tag("native")]
    | Annotated[SglangSettings, Tag("sglang")]
    | Annotated[OpenAiSettings, Tag("openai")]
    | Annotated[VllmSettings, Tag("vllm")]
    | Annotated[AddedSettings, Tag(_ADDED)],
    Discriminator(_tag),
]
