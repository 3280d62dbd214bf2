"""Chat templates: tokens as transformers gives them, turn by turn, and templates that a run refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.plugins.language.chat_families import FAMILIES, GOLDEN, SAID, by_transformers, turns_of, write_family

from polyrhythm.envs.base import RowsFailed
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text import Reply, TextSettings
from polyrhythm.plugins.language.text.chat import ChatTemplate, ChatTurns, TemplateFault
from polyrhythm.specs import Trajectory

TOKENS: dict[str, list[list[int]]] = {k: v for k, v in json.loads(GOLDEN.read_text()).items() if k != "transformers"}


class Scripted:
    """Says what `SAID` has, whatever the messages are, which it keeps."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def begin(self, task: int, seed: int) -> str:
        self._step = 0
        return SAID[0]

    def reply(self, message: str) -> Reply:
        self._heard.append(message)
        self._step += 1
        return Reply(SAID[2 * self._step], done=False) if self._step < 3 else Reply()

    def expert(self) -> str:
        return SAID[2 * self._step + 1] if self._step < 2 else "#2"


class ScriptedSettings(TextSettings):
    type: str = "scripted"
    max_turns: int = 3
    max_new_tokens: int = 12
    max_prompt_tokens: int = 300

    def conversation(self) -> Scripted:
        return Scripted(HEARD)


HEARD: list[str] = []


def settings(folder: Path, name: str, **more: Any) -> ScriptedSettings:
    own = FAMILIES[name].settings
    return ScriptedSettings(**{"tokenizer": str(folder), "chat": own or "auto", **more})


def seen(batch: Any) -> list[int]:
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    batch.observe([0], out)
    return out["tokens"][0, : out["length"][0]].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_have_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    env = settings(write_family(tmp_path, name), name)
    env.check()
    batch = env.build(1)
    batch.reset([0], [0], [0])
    HEARD.clear()
    shown, actions = [], []
    for _ in range(3):
        shown.append(seen(batch))
        actions.append(batch.expert_actions([0]))
        batch.step([0], actions[-1])
    assert shown == TOKENS[name]
    assert list(HEARD) == [SAID[1], SAID[3], "#2"], "without ends, and spaces that belong to the template"
    assert shown == [by_transformers(tmp_path, name, turns) for turns in (1, 2, 3)], "as the installed one does"
    found = env.transcribe(sample(env, shown, np.concatenate(actions)))
    assert (found.prompt, found.messages) == (SAID[0], (SAID[1], SAID[3], "#2")), "a reward function gets the texts"


def sample(env: TextSettings, shown: list[list[int]], actions: Any) -> Trajectory:
    """The trajectory of these prompts and messages."""
    tokens = np.zeros((3, env.max_prompt_tokens), np.int32)
    for turn, ids in enumerate(shown):
        tokens[turn, : len(ids)] = ids
    ends = np.isin(actions[:, :, 0], env.spec().action.stops).argmax(1)
    return Trajectory(
        obs={"tokens": tokens, "length": np.array(list(map(len, shown)))},
        actions=actions,
        valid=np.arange(actions.shape[1]) <= ends[:, None],
        forward_inputs={},
        terminated=True,
        truncated=False,
        success=False,
        env_steps=3,
        **{name: np.zeros((3, 12)) for name in ("logprob", "value", "rewards", "version")},
        **dict.fromkeys(("ticket", "group", "task"), 0),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_begin_of_text_token_stands_once(tmp_path: Path, name: str) -> None:
    """Though the template writes it and the tokenizer adds it to a text; where neither does, there is none."""
    tokenizer = settings(write_family(tmp_path, name), name).text_tokenizer()
    named = ("<|begin_of_text|>", "<bos>", "<s>", "<｜begin｜>")
    starts = [i for i in tokenizer.marks if tokenizer.decode([i]) in named]
    assert [TOKENS[name][2].count(i) for i in starts] == [1] * len(starts)
    assert (len(starts) == 1) == bool(FAMILIES[name].start or name == "mistral")


class TurnsSettings(ScriptedSettings):
    def conversation(self) -> Any:
        class WithSystem(Scripted):
            def begin(self, task: int, seed: int) -> Any:
                super().begin(task, seed)
                return turns_of("llama3", 1)

        return WithSystem(HEARD)


def test_a_prompt_may_have_several_turns(tmp_path: Path) -> None:
    """Its own system turn goes before that of the settings; without a template each has lines of its own."""
    folder, own = write_family(tmp_path, "llama3"), FAMILIES["llama3"].settings
    batches = [
        TurnsSettings(tokenizer=str(folder), chat=chat).build(1) for chat in ({**own, "system": "Be long."}, "none")
    ]
    for batch in batches:
        batch.reset([0], [0], [0])
    assert seen(batches[0]) == TOKENS["llama3"][0]
    assert batches[1].transcript(0) == f"{own['system']}\n{SAID[0]}\n"


@pytest.mark.parametrize("layout", ["jinja", "named", "processor"])
def test_a_template_is_found_in_every_layout(tmp_path: Path, layout: str) -> None:
    batch = settings(write_family(tmp_path, "chatml", layout=layout), "chatml").build(1)
    batch.reset([0], [0], [0])
    assert seen(batch) == TOKENS["chatml"][0]
    if layout != "processor":  # which transformers reads for processors alone
        assert by_transformers(tmp_path, "chatml", 1) == TOKENS["chatml"][0]


def test_a_template_may_be_a_file_or_one_of_several_names(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "chatml", layout="named")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    own = tmp_path / "own.jinja"
    own.write_text("<{{ messages[-1].content }}>")
    for template, shown in (("rag", "1"), ("short", SAID[0]), (str(own), f"<{SAID[0]}>")):
        env = settings(folder, "chatml", chat={"template": template}, max_turns=1)
        batch = env.build(1)
        batch.reset([0], [0], [0])
        assert env.text_tokenizer().decode(seen(batch)) == shown
    told = r"env\.chat\.template = tool: there is no such file; the tokenizer's folder has default, rag, short"
    with pytest.raises(ConfigError, match=told):
        settings(folder, "chatml", chat={"template": "tool"}).spec()


def test_without_a_template_auto_is_plain_text(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "chatml", layout="none")
    plain, auto = (settings(folder, "chatml", chat=chat).build(1) for chat in ("none", "auto"))
    for batch in (plain, auto):
        batch.reset([0], [0], [0])
    assert seen(plain) == seen(auto)
    with pytest.raises(ConfigError, match=r"env\.chat: there is no chat template for the tokenizer of .*; name a file"):
        settings(folder, "chatml", chat={"system": "Be brief."}).spec()


def test_a_reply_that_has_the_stand_in_keeps_its_beginning(tmp_path: Path) -> None:
    chat = settings(write_family(tmp_path, "chatml"), "chatml").open_chat()
    assert chat is not None
    assert ChatTurns(chat, "a").reply("\ue000message\ue001b") == ChatTurns(chat, "a").reply("b")


def test_a_template_that_is_not_applied_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_family(tmp_path, "chatml")
    ScriptedSettings(tokenizer=str(folder), chat="none").check()
    assert not caplog.messages
    ScriptedSettings(tokenizer=str(folder)).check()
    (told,) = caplog.messages
    assert told.startswith(f"env.tokenizer = {folder}: it has a chat template, which is not applied")


def test_the_end_of_the_template_is_the_preferred_stop(tmp_path: Path) -> None:
    """Of generation_config.json, of the tokenizer, and that of the template, though no file names it."""
    folder = write_family(tmp_path, "chatml")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    env = settings(folder, "chatml")
    assert env.spec().action.stops == (2, 0)
    batch = env.build(1)
    batch.reset([0], [0], [0])
    before = seen(batch)
    action = np.full((1, env.max_new_tokens, 1), 7)
    action[0, :3, 0] = (9, 8, 0)
    result = batch.step([0], action)
    assert result.executed is not None
    assert result.executed[0].tolist() == [True] * 3 + [False] * 9, "its end is the policy's, and is learned"
    after = TOKENS["chatml"][1][len(TOKENS["chatml"][0]) :]
    written = after[after.index(2) :]  # the end of the message, the reply, the beginning of the next message
    assert seen(batch) == [*before, 9, 8, 0, *written], "another end stays as it was sampled"
    action[0, :3, 0] = (9, 8, 2)
    batch.reset([0], [0], [0])
    batch.step([0], action)
    assert seen(batch) == [*before, 9, 8, *written], "the template's own end is not repeated"


def test_a_cut_message_ends_the_episode_without_text_after_it(tmp_path: Path) -> None:
    batch = settings(write_family(tmp_path, "chatml"), "chatml").build(1)
    batch.reset([0], [0], [0])
    result = batch.step([0], np.full((1, 12, 1), 9))
    assert result.terminated.all()
    assert result.metrics["cut"].tolist() == [1.0]
    assert seen(batch) == TOKENS["chatml"][0]


def test_a_template_may_write_no_end_of_a_message(tmp_path: Path) -> None:
    """The tokenizer's own end stays, and the next turn follows it; one token per character goes too."""
    file = tmp_path / "plain.jinja"
    file.write_text(
        "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    env = ScriptedSettings(chat={"template": str(file)})
    env.check()
    assert env.spec().action.stops == (0,)
    batch = env.build(1)
    batch.reset([0], [0], [0])
    batch.step([0], batch.expert_actions([0]))
    encode = env.text_tokenizer().encode
    first, second = f"user: {SAID[0]}\nassistant: {SAID[1]}", f"\nuser: {SAID[2]}\nassistant: "
    assert seen(batch) == [*encode(first), 0, *encode(second)]


def test_a_space_before_the_end_of_a_message_is_left_out(tmp_path: Path) -> None:
    """As Llama 2 has one: the end that was sampled is not written again behind it."""
    template = FAMILIES["mistral"].template.replace("| trim + eos_token", "| trim + ' ' + eos_token")
    env = settings(write_family(tmp_path, "mistral", template=template), "mistral")
    env.check()
    batch = env.build(1)
    batch.reset([0], [0], [0])
    for turn in range(3):
        assert seen(batch) == TOKENS["mistral"][turn]
        batch.step([0], batch.expert_actions([0]))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_of_earlier_turns_changes(tmp_path: Path, name: str) -> None:
    """Whatever tokens a model samples: halves of characters, marks of turns, spaces at the end."""
    env = settings(write_family(tmp_path, name), name)
    batch, random = env.build(1), Random(name)
    end = env.spec().action.stops[0]
    others = [i for i in range(env.spec().action.choices) if i not in env.spec().action.stops]
    for _ in range(20):
        batch.reset([0], [0], [0])
        for _ in range(2):
            before, message = seen(batch), [*random.choices(others, k=random.randrange(8)), end]
            action = np.full((1, env.max_new_tokens, 1), end)
            action[0, : len(message), 0] = message
            assert not batch.step([0], action).terminated.any()
            assert seen(batch)[: len(before) + len(message)] == [*before, *message]


CHATML = FAMILIES["chatml"].template
#: Templates that change earlier turns, and what is said of them.
REWRITES = {
    "reasoning": (
        CHATML.replace("turn.content", "(turn.content if loop.last else turn.content.split('</think>')[-1])"),
        r"writes earlier messages without what stands between <think> and </think>; set env\.max_turns to 1, name a",
    ),
    "system in the last turn": (
        """{% for turn in messages %}{% if turn.role != 'system' %}<|im_start|>
{{- messages[0].content if loop.last }}{{ turn.content }}<|im_end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>{% endif %}""",
        r"once a turn is added it writes 'a<\|im_end\|><\|im_start\|>…<.*' where 'Answer with a number\.a<.*' stood",
    ),
    "number of turns": (
        "{{ messages | length }}" + CHATML,
        r"once a turn is added it writes '4<\|im_start\|>.*' where '2<\|im_start\|>.*' stood before",
    ),
    "generation prompt alone": (
        CHATML.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'"),
        r"it writes '…<\|im_end\|>.*' where '<think>\\n\\n</think>.*' stood before",
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path, name: str) -> None:
    template, told = REWRITES[name]
    folder = write_family(tmp_path, "chatml", template=template)
    chat = {"system": "Answer with a number."}
    with pytest.raises(ConfigError, match=told):
        settings(folder, "chatml", chat=chat).check()
    settings(folder, "chatml", chat=chat, max_turns=1).check()


@pytest.mark.parametrize("name", REWRITES)
def test_earlier_turns_are_kept_where_that_is_wanted(tmp_path: Path, name: str) -> None:
    chat = {"system": "Answer with a number.", "earlier": "keep"}
    env = settings(write_family(tmp_path, "chatml", template=REWRITES[name][0]), "chatml", chat=chat)
    env.check()
    batch = env.build(1)
    batch.reset([0], [0], [0])
    for reply in (SAID[2], SAID[4]):
        before, action = seen(batch), batch.expert_actions([0])
        batch.step([0], action)
        message = action[0, : action[0, :, 0].tolist().index(2) + 1, 0].tolist()
        assert seen(batch)[: len(before) + len(message)] == [*before, *message]
        assert reply in env.text_tokenizer().decode(seen(batch)[len(before) + len(message) :])


@pytest.mark.parametrize(
    ("name", "chat", "told"),
    [
        ("llama3", {"system": "Be brief."}, r"today's date, so that tokens would differ from day to day; set date"),
        ("gemma", {"system": "Be brief."}, r"turns of system, user: no system turn here; correct env\.chat"),
        ("gemma", {"reply_role": "tool"}, r"turns of user, assistant, tool: user and model alternate"),
        ("mistral", {"reply_role": "tool"}, r"turns of user, assistant, tool: there are user and assistant alone"),
    ],
)
def test_turns_that_a_template_refuses_fail_before_the_start(
    tmp_path: Path, name: str, chat: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(write_family(tmp_path, name), name, chat=chat).check()


def test_a_template_gets_the_date_that_is_set(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama3")
    env = settings(folder, "llama3", chat={"system": FAMILIES["llama3"].settings["system"], "date": "2024-02-01"})
    batch = env.build(1)
    batch.reset([0], [0], [0])
    assert "Today: 01 Feb 2024" in env.text_tokenizer().decode(seen(batch))


def test_a_prompt_that_a_template_refuses_is_set_aside(tmp_path: Path) -> None:
    """Alone: others go on."""
    template = "{% if '3' in messages[0].content %}{{ raise_exception('no 3') }}{% endif %}" + CHATML
    batch = settings(write_family(tmp_path, "chatml", template=template), "chatml").build(1)
    with pytest.raises(RowsFailed, match="no 3") as failed:
        batch.reset([0], [0], [0])
    assert type(failed.value.errors[0]).__name__ == "EpisodeRefused"


BOMBS = {
    "time": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "time without calls": "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "product": "{{ 'a' * 1000000000 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sum": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "output": "{% for a in range(90000) %}" + "x" * 1000 + "{% endfor %}",
    "python": "{{ messages.__class__.__base__.__subclasses__() }}",
    "function": "{{ raise_exception.__globals__.keys() }}",
    "namespace": "{% set n = namespace() %}{{ n.__init__.__globals__.keys() }}",
    "class": "{{ dict.mro()[1].__subclasses__() }}",
    "change": "{{ messages.append(1) }}",
    "number": "{{ messages + 1 }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_leave_its_sandbox_nor_run_on(name: str) -> None:
    with pytest.raises(TemplateFault):
        ChatTemplate(BOMBS[name], {}, None).render([{"role": "user", "content": "a"}], ask=True)


def test_a_template_that_is_not_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for text, told in (("{% for %}", "not a valid template .*line 1"), ("x" * 2**21, "more than 1 MiB")):
        folder = write_family(tmp_path, "chatml", layout="jinja", template=text)
        with pytest.raises(ConfigError, match=rf"env\.chat = auto \(.*chat_template\.jinja\): it (is|has) {told}"):
            settings(folder, "chatml").spec()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        settings(tmp_path, "chatml").spec()


def test_filters_and_globals_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = """{%- set n = namespace(seen=[]) -%}
{%- for m in messages if m.role == 'user' %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
    {{- loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem is defined }} {{ m | tojson(indent=2) }}
    {%- set n.seen = n.seen + [m.content] %}
{%- endfor %}
{{ n.seen | join('|') ~ dict(a=1) | tojson }}{{ "<é&>" | tojson }} {{ bos_token }}{{ tools is none }}{{ 7 % 4 }}
  {% generation %}x{% endgeneration %}
{{ add_generation_prompt and not x is defined }}{{ 'a,b'.split(',')[-1] }}{{ messages[::-1][0].content }}
"""
    messages = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(("user", "assistant") * 6)]
    expected, _ = render_jinja_template([messages], chat_template=text, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(text, {"bos_token": "<s>"}, None).render(messages, ask=True) == expected[0]


def test_templates_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "chatml")
    program = (
        "import sys\n"
        "from polyrhythm.plugins.language.text.chains import ChainsSettings\n"
        "batch = ChainsSettings(tokenizer=sys.argv[1], chat='auto', max_prompt_tokens=200).build(1)\n"
        "batch.reset([0], [0], [0])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "[]"
