"""Small tokenizers and chat templates of our own in the formats of six families of models.

`python -m tests.plugins.language.chat_families` writes golden/chat_families.json: the tokens that transformers gives.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

GOLDEN = Path(__file__).parent / "golden" / "chat_families.json"
#: A conversation as (prompt, message, reply, message, reply), whose turns are compared.
SAID = ("4+1-3=", "<4+1>", "5; a b", "<5-3>", "2;")
SYSTEM = "Answer with a number."


class Family(NamedTuple):
    """template; marks: special tokens by id from 0; end: of a message; start: what the tokenizer itself puts before a
    text; spaces: of pieces with ▁ for spaces, instead of bytes; strips: marks that swallow white space behind them;
    settings: of `env.chat`; ends: of generation_config.json."""

    template: str
    marks: tuple[str, ...]
    end: str
    start: str = ""
    spaces: bool = False
    strips: tuple[str, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012
    ends: tuple[int, ...] = ()


FAMILIES = {
    "chatml": Family(
        """{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif -%}
{%- for turn in messages -%}
{{ '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
""",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ends=(2, 0),
    ),
    "llama3": Family(
        """{{- bos_token }}
{%- set day = day or strftime_now('%d %b %Y') %}
{%- for turn in messages %}
    {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if turn['role'] == 'system' %}
        {{- 'Today: ' + day + '\\n' }}
    {%- endif %}
    {{- turn['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        start="<|begin_of_text|>",
        settings={"system": SYSTEM, "variables": {"day": "1 Feb 2024"}},
        ends=(1,),
    ),
    "gemma": Family(
        """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('no system turn here') }}{% endif %}{% for turn in messages %}
{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and model alternate') }}{% endif %}
{{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) }}
{{ turn['content'] | trim + '<end_of_turn>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        start="<bos>",
        spaces=True,
        ends=(1, 4),
    ),
    "mistral": Family(
        """{%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if first else messages -%}
{{- bos_token -}}
{%- for turn in turns -%}
{%- if turn['role'] == 'user' -%}
{{ '[INST] ' + (first if loop.first else '') + turn['content'] + ' [/INST]' }}
{%- elif turn['role'] == 'assistant' -%}
{{ ' ' + turn['content'] | trim + eos_token }}
{%- else -%}
{{ raise_exception('there are user and assistant alone') }}
{%- endif -%}
{%- endfor -%}
""",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        start="<s>",
        spaces=True,
        settings={"system": SYSTEM},
    ),
    "phi3": Family(
        """{% for turn in messages %}{{ '<|' + turn['role'] + '|>\\n' + turn['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        spaces=True,
        strips=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        settings={"system": SYSTEM},
        ends=(0, 4),
    ),
    "deepseek": Family(
        """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system='') %}
{%- for turn in messages %}{% if turn['role'] == 'system' %}{% set ns.system = turn['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for turn in messages %}
{%- if turn['role'] == 'user' %}{{ '<｜User｜>' + turn['content'] }}{% endif %}
{%- if turn['role'] == 'tool' %}{{ '<｜Result｜>' + turn['content'] }}{% endif %}
{%- if turn['role'] == 'assistant' %}
{%- generation %}{{ '<｜Assistant｜>' + turn['content'] + '<｜end｜>' }}{% endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
        ("<｜begin｜>", "<｜end｜>", "<｜User｜>", "<｜Assistant｜>", "<｜Result｜>"),
        "<｜end｜>",
        start="<｜begin｜>",
        settings={"system": SYSTEM, "reply_role": "tool"},
    ),
}
_NAMED = {
    "bos_token": ("<|begin_of_text|>", "<bos>", "<s>", "<｜begin｜>"),
    "eos_token": ("<|im_end|>", "<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>", "<｜end｜>"),
}


def write_family(folder: Path, name: str, *, layout: str = "tokenizer_config", template: str | None = None) -> Path:
    """A folder with the family's tokenizer and its template, kept as this layout has it."""
    family = FAMILIES[name]
    tokenizer = _pieces(family) if family.spaces else _bytes(family)
    tokenizer.add_special_tokens(
        [AddedToken(text, rstrip=text in family.strips, normalized=False, special=True) for text in family.marks]
    )
    if family.start:
        number = tokenizer.token_to_id(family.start)
        begin = processors.TemplateProcessing(single=f"{family.start} $A", special_tokens=[(family.start, number)])
        tokenizer.post_processor = begin
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, texts in _NAMED.items():
        config |= dict.fromkeys([key], next((text for text in texts if text in family.marks), None))
    text = family.template if template is None else template
    if layout == "tokenizer_config":
        config["chat_template"] = text
    elif layout == "named":
        config["chat_template"] = [{"name": "default", "template": text}, {"name": "rag", "template": "{{ 1 }}"}]
    elif layout == "jinja":
        config["chat_template"] = "{{ 'an older one' }}"
        (folder / "chat_template.jinja").write_text(text)
    elif layout == "processor":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if family.ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(family.ends)}))
    return folder


def _vocabulary(family: Family, pieces: Sequence[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate((*family.marks, *pieces))}


def _bytes(family: Family) -> Tokenizer:
    merges = [("a", "s"), ("e", "r"), ("Ġ", "a"), ("4", "+")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(_vocabulary(family, pieces), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(family: Family) -> Tokenizer:
    merges = [("a", "s"), ("▁", "a"), ("▁", "<"), ("4", "+")]
    singles = ["▁", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*singles, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(_vocabulary(family, pieces), merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(Regex(" "), "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def turns_of(name: str, turns: int) -> list[dict[str, str]]:
    """The messages before the model's next one, with so many prompts and replies."""
    settings = FAMILIES[name].settings
    system = settings.get("system")
    roles = ["user", *("assistant", settings.get("reply_role", "user")) * 2]
    said = [{"role": role, "content": text} for role, text in zip(roles, SAID, strict=True)]
    return [*([{"role": "system", "content": system}] if system else []), *said[: 2 * turns - 1]]


def by_transformers(folder: Path, name: str, turns: int) -> list[int]:
    from transformers import AutoTokenizer

    found: list[int] = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        turns_of(name, turns),
        add_generation_prompt=True,
        return_dict=False,
        **FAMILIES[name].settings.get("variables", {}),
    )
    return found


def main() -> None:
    import transformers

    tokens = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in FAMILIES:
            made = write_family(Path(folder) / name, name)
            tokens[name] = [by_transformers(made, name, turns) for turns in (1, 2, 3)]
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f' "{name}": {json.dumps(ids)}' for name, ids in tokens.items())
    GOLDEN.write_text(f'{{\n "transformers": "{transformers.__version__}",\n{lines}\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
