"""Ways of generating from one model of transformers: a function from prompts to as many answers of `new` tokens each.

All sample at one temperature on this process's threads. Ours and bare vLLM give the log-prob of each token, which
training needs; transformers gives none here, as it would have to keep all logits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from polyrhythm.plugins.language.causal_lm.engine import NativeEngine, Sampling
from polyrhythm.plugins.language.causal_lm.engine_settings import VllmSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork, random_network
from polyrhythm.plugins.language.causal_lm.vllm_engine import BLOCK, VllmEngine, VllmModel
from polyrhythm.policies.engine import Engine, EngineRequest

Prompts = Sequence[Sequence[int]]
#: Generates an answer of so many tokens for each prompt; the tokens that it generated, all in all.
Generate = Callable[[Prompts, int], int]

VOCABULARY, TEMPERATURE = 256, 0.7
_CACHE_GIB = 0.5


def small_llama(length: int) -> CausalNetwork:
    """A random Llama of 0.9 million parameters for sequences of so many tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return random_network(config, 0).eval()


def ours(engine: Engine) -> Generate:
    """Through an engine of ours, which has no stops."""

    def generate(prompts: Prompts, new: int) -> int:
        for number, prompt in enumerate(prompts):
            engine.add(EngineRequest(number, np.array(prompt, np.int32), new, False, 7919 * number + 5))
        tokens, left = 0, len(prompts)
        while left:
            for found in engine.step():
                assert len(found.logprobs) == new
                tokens, left = tokens + len(found.tokens), left - 1
        return tokens

    return generate


def native(network: CausalNetwork, capacity: int, length: int) -> Generate:
    """The native engine."""
    return ours(NativeEngine(network, Sampling(VOCABULARY, TEMPERATURE), (), capacity=capacity, length=length))


def through_us(network: CausalNetwork, capacity: int, length: int) -> Generate:
    """The engine vllm."""
    sampling = Sampling(VOCABULARY, TEMPERATURE)
    model = VllmModel(network, sampling, VllmSettings(cache_gib=_CACHE_GIB), capacity=capacity, length=length)
    return ours(VllmEngine(model, network, (), capacity=capacity, length=length))


def bare_vllm(network: CausalNetwork, capacity: int, length: int, *, logprobs: bool) -> Generate:
    """vLLM's own loop and sampling, in this process, as vLLM sets itself. After `through_us`, which sets how vLLM is
    imported."""
    from vllm import EngineArgs, SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory(prefix="polyrhythm-vllm-") as folder:
        network.model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype="float32",
                max_model_len=length,
                max_num_seqs=capacity,
                block_size=BLOCK,
                kv_cache_memory_bytes=int(_CACHE_GIB * 2**30),
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        )
    added = 0

    def generate(prompts: Prompts, new: int) -> int:
        nonlocal added
        for prompt in prompts:
            params = SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=new,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if logprobs else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(added), tokens_input(list(prompt)), params)
            added += 1
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return tokens

    return generate


def plain_model(network: CausalNetwork) -> Any:
    """The same model with transformers' own attention."""
    config = deepcopy(network.model.config)  # transformers writes the kind of attention into it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.load_state_dict(network.model.state_dict())
    return model


def transformers_generate(model: Any) -> Generate:
    """`generate` on all prompts, which have one length, at once."""

    @torch.no_grad()
    def generate(prompts: Prompts, new: int) -> int:
        tokens = torch.tensor(prompts)
        settings = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=new)
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
        return int(found[:, tokens.shape[1] :].numel())

    return generate


@contextmanager
def continuous_batching(model: Any, capacity: int, length: int) -> Iterator[Generate]:
    """transformers' continuous batching, whose thread has room for all answers."""
    settings = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1)
    room = ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=capacity * -(-length // BLOCK), max_batch_tokens=capacity * BLOCK
    )
    manager = model.init_continuous_batching(settings, room)
    manager.start()

    def generate(prompts: Prompts, new: int) -> int:
        for prompt in prompts:
            manager.add_request(list(prompt), max_new_tokens=new)
        tokens, left = 0, len(prompts)
        while left:
            found = manager.get_result(timeout=60.0)
            assert found is not None
            assert found.error is None, found.error
            tokens, left = tokens + len(found.generated_tokens), left - 1
        return tokens

    try:
        yield generate
    finally:
        manager.stop(block=True)


@contextmanager
def all_of(capacity: int, length: int) -> Iterator[dict[str, Generate]]:
    """Those that can run here, by name."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    network = small_llama(length)
    found = {
        "native": native(network, capacity, length),
        "generate": transformers_generate(plain_model(network)),
    }
    if find_spec("vllm") is not None:
        found["vllm"] = through_us(network, capacity, length)
        found["bare_vllm"] = bare_vllm(network, capacity, length, logprobs=True)
        found["bare_vllm_no_logprobs"] = bare_vllm(network, capacity, length, logprobs=False)
    with continuous_batching(plain_model(network), capacity, length) as generate:
        yield found | {"continuous_batching": generate}
