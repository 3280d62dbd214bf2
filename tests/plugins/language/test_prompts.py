"""Prompts from files: what is read, what is refused, which rows an episode has, and the verifiers."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.long import long
from tests.plugins.language.chat_families import write_family

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.plugins.language.text.answer_verifiers import Exact, Json, Math, Regex, VerifierSettings
from polyrhythm.plugins.language.text.prompts import PromptsSettings
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs.hashing import HELD_OUT


def sums(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(first, first + count)]


def written(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return str(path)


def settings(files: str | tuple[str, ...], **others: Any) -> PromptsSettings:
    return PromptsSettings(**{"files": files, "max_prompt_tokens": 40, "max_new_tokens": 8, **others})


VERL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"question": "1+1=", "answer": "2"}, {}),
        ({"prompt": "1+1=", "solution": 2}, {}),
        ({"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": 2.0}, {}),
        (VERL, {}),
        ({"data": {"ask": "1+1=", "right": {"it": "2"}}}, {"prompt": "data.ask", "answer": "data.right.it"}),
        ({"a.b": "1+1=", "c": "2", "question": "other"}, {"prompt": "a.b", "answer": "c"}),
    ],
    ids=["question", "trl", "trl messages", "verl", "nested", "dot in a name"],
)
def test_columns_are_recognised_or_named(row: dict[str, Any], names: dict[str, str], tmp_path: Path) -> None:
    rest = json.loads(json.dumps(row).replace("1+1=", "3+3="))
    made = settings(written(tmp_path / "a.jsonl", [row]), eval_files=written(tmp_path / "b.jsonl", [rest]), **names)
    conversation = made.conversation()
    assert conversation.begin(0, 5) == "1+1="
    assert conversation.begin(0, 5 | HELD_OUT) == "3+3="
    assert conversation.reply("2").reward == 1.0
    assert conversation.reply("3").reward == 0.0


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = sums(30)
    lines = "".join(json.dumps(row) + "\r\n" for row in rows)
    table = "question,answer\r\n" + "".join(f'"{row["question"]}",{row["answer"]}\r\n' for row in rows)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + table.encode())
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(table.encode()))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [settings(str(tmp_path / name)).data() for name in ("a.jsonl", "a.json", "a.csv", "b.csv.gz", "a.parquet")]
    for data in found:
        assert [row.columns for row in data.training] == [row.columns for row in found[0].training]
        assert [row.columns for row in data.held_out] == [row.columns for row in found[0].held_out]
    assert len(found[0].training) + len(found[0].held_out) == 30


def test_messages_of_verl_in_parquet_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(json.dumps(VERL).replace("1+1=", f"{i}+1=")) for i in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = settings(str(tmp_path / "a.parquet"), held_out=0.5).data()
    assert len(data.training) + len(data.held_out) == 8
    assert data.training[0].answer == "2"


GOOD = b'{"question": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"", r"env.files = .*a.jsonl: it is empty"),
        ("a.jsonl", b"\n\n", r"it has no rows"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", \n', r"a.jsonl, line 2: it is not JSON"),
        ("a.jsonl", GOOD + b'["2+2=", "4"]\n', r"a.jsonl, line 2: it is of type list, not an object"),
        ("a.jsonl", GOOD + b'{"question": "2+2="}\n', r"env.answer = answer: a.jsonl, line 2 has no such column"),
        ("a.jsonl", GOOD + b'{"answer": "4"}\n', r"env.prompt = question: a.jsonl, line 2 has no such column but ans"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", "answer": null}\n', r"in a.jsonl, line 2 it is empty"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", "answer": " "}\n', r"in a.jsonl, line 2 it is empty"),
        ("a.jsonl", GOOD + b'{"question": " ", "answer": "4"}\n', r"env.prompt = question: in a.jsonl, line 2 it is"),
        ("a.jsonl", GOOD + b'{"question": null, "answer": "4"}\n', r"env.prompt = .* line 2 it is empty"),
        ("a.jsonl", GOOD + b'{"question": 4, "answer": "4"}\n', r"line 2 it is of type int; a text or a list"),
        ("a.jsonl", GOOD + b'{"question": ["4"], "answer": "4"}\n', r"line 2 it is a list with '4'; each message"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", "answer": NaN}\n', r"a.jsonl, line 2: it has NaN"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", "answer": ["4"]}\n', r"line 2 it is of type list; this verifier"),
        ("a.jsonl", GOOD + b'{"question": "2+2=", "answer": true}\n', r"line 2 it is of type bool; this verifier"),
        ("a.jsonl", GOOD + b'{"question": "caf\xe9", "answer": "4"}\n', r"a.jsonl, line 2: it is not UTF-8"),
        ("a.jsonl", b'{"ask": "1+1=", "answer": "2"}\n', r"env.prompt is recognised .*one of its columns: ask, answer"),
        ("a.jsonl", b'{"prompt": "1+1=", "right": "2"}\n', r"env.answer is recognised .*one of its columns: prompt, r"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl, line 1: it is not JSON"),
        ("a.json", b'{"question": "1+1="}', r"a.json: it is of type dict, not a list of rows"),
        ("a.csv", b"question,answer\n1+1=,2,3\n", r"a.csv, line 2: it has 3 entries, the first line has 2"),
        ("a.csv", b"question,question\n1+1=,2\n", r"line 1: columns without a name, or with one twice"),
        ("a.csv", b'question,answer\n"1+1=,2\n', r"a.csv, line \d: it is not CSV"),
        ("a.csv", b"question,answer\n", r"it has no rows"),
        ("a.parquet", b"PAR1 and more", r"a.parquet: it is not a Parquet file"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz: it is not a whole gzip file"),
        ("a.txt", GOOD, r"its format is unknown; name a file that ends in .jsonl"),
        ("a", GOOD, r"its format is unknown"),
    ],
)
def test_unusable_files_are_refused_in_a_sentence(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told) as error:
        settings(str(tmp_path / name)).spec()
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"env.files = .*none.jsonl: there is no such file"):
        settings(str(tmp_path / "none.jsonl")).spec()
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"it is a folder"):
        settings(str(tmp_path / "a.jsonl")).spec()
    file = written(tmp_path / "b.jsonl", sums(4))
    with pytest.raises(MissingError, match=r"env.eval_files = .*none.jsonl: there is no such file"):
        settings(file, eval_files=str(tmp_path / "none.jsonl")).spec()


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingError, match=r"Parquet needs the package pyarrow.*polyrhythm\[parquet\]"):
        settings(str(tmp_path / "a.parquet")).spec()


def test_prompts_of_several_messages_need_a_chat_template(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "2"}
    with pytest.raises(
        ConfigError, match=r"a.jsonl, line 1 is a conversation \(system, user\), which needs a chat .*set env.chat"
    ):
        settings(written(tmp_path / "a.jsonl", [row] * 3), eval_files=written(tmp_path / "b.jsonl", sums(1))).spec()


def test_prompt_length_includes_the_chat_template(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "chatml")
    said = [
        [{"role": "system", "content": "b"}, {"role": "user", "content": text}] for text in ("1+1=", "2+2", "3" * 99)
    ]
    rows = [{"prompt": turns, "answer": "2"} for turns in said]
    given = {"tokenizer": str(folder), "chat": "auto", "max_prompt_tokens": 60}
    files = {"eval_files": written(tmp_path / "b.jsonl", rows[1:2])}
    made = settings(written(tmp_path / "a.jsonl", rows), **files, **given)
    batch = made.build(1)
    batch.reset([0], [0], [0])
    begun = "<|im_start|>system\nb\n<|im_start|>user\n1+1=\n<|im_start|>assistant\n"
    assert batch.transcript(0) == begun, "shown without ends"
    assert (made.spec().training_states, made.data().set_aside) == (1, 1)
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    batch.observe([0], out)
    fits = settings(
        written(tmp_path / "c.jsonl", rows[:1]), **files, **{**given, "max_prompt_tokens": int(out["length"][0])}
    )
    assert fits.spec().training_states == 1
    with pytest.raises(ConfigError, match=r"max_prompt_tokens = 9"):
        settings(written(tmp_path / "c.jsonl", rows[:1]), **files, **{**given, "max_prompt_tokens": 9}).spec()


def test_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", sums(400) * 2)
    data = settings(file).data()
    held, trained = ({row.prompt for row in side} for side in (data.held_out, data.training))
    assert len(held) + len(trained) == 400
    assert 8 < len(held) < 34, "of 5%"
    more = settings(written(tmp_path / "b.jsonl", sums(500))).data()
    assert held <= {row.prompt for row in more.held_out}, "more rows move none"


def test_what_evaluation_files_have_is_left_out_of_training(tmp_path: Path) -> None:
    file, other = written(tmp_path / "a.jsonl", sums(20)), written(tmp_path / "b.jsonl", sums(5, 18))
    data = settings(file, eval_files=other).data()
    assert [row.answer for row in data.training] == [str(2 * i) for i in range(18)]
    assert [row.answer for row in data.held_out] == [str(2 * i) for i in range(18, 23)]
    assert data.notes == ("env.eval_files: 2 of 20 rows of env.files have these prompts; not trained on",)
    said = [{"prompt": [{"role": "user", "content": f"{i}+{i}=\n"}], "answer": "1"} for i in (3, 99)]
    assert len(settings(file, eval_files=written(tmp_path / "d.jsonl", said)).data().training) == 19
    with pytest.raises(ConfigError, match=r"of 20 rows none is left for training"):
        settings(file, eval_files=file).spec()
    with pytest.raises(ConfigError, match=r"of 2 rows none is left for evaluations"):
        settings(written(tmp_path / "c.jsonl", sums(2))).spec()


def test_an_epoch_has_each_row_once_and_groups_share_theirs(tmp_path: Path) -> None:
    made = settings(written(tmp_path / "a.jsonl", sums(23)), eval_files=written(tmp_path / "b.jsonl", sums(4, 50)))
    spec, conversation = made.spec(), made.conversation()
    rules = SchedulerSettings(batch_size=4, group_size=4, max_lag=99, training_states=spec.training_states, seed=3)
    admission = Admission(rules, target=100)
    tickets = [admission.next(0, {}) for _ in range(4 * 23 * 3)]
    prompts = [conversation.begin(t.task, t.seed) for t in tickets if t is not None]
    groups = [prompts[first : first + 4] for first in range(0, len(prompts), 4)]
    assert all(len(set(group)) == 1 for group in groups)
    epochs = [[group[0] for group in groups[first : first + 23]] for first in (0, 23, 46)]
    assert all(Counter(epoch) == Counter(row["question"] for row in sums(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each in an order of its own"
    again = Admission(rules)
    assert [again.start_of(number)[1] for number in (40, 7)] == [tickets[4 * n].seed for n in (40, 7)], "at any place"
    assert len({ticket.seed for ticket in tickets[::4]}) == 69, "set aside by seed"
    assert all(0 <= ticket.seed < HELD_OUT for ticket in tickets)


def test_an_evaluation_takes_the_held_out_rows_in_order(tmp_path: Path) -> None:
    made = settings(written(tmp_path / "a.jsonl", sums(9)), eval_files=written(tmp_path / "b.jsonl", sums(4, 50)))
    conversation = made.conversation()
    episodes = held_out(6, 7, 1, greedy=True, initial_states=made.spec().initial_states)
    order = [50, 51, 52, 53, 50, 51]
    assert [conversation.begin(0, one.seed) for one in episodes] == [f"{i}+{i}=" for i in order]
    assert len({one.seed for one in episodes}) == 6


def test_prompts_that_cannot_be_shown_are_counted_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huge, odd, half = ({"question": text, "answer": "2"} for text in ("9" * 5_000_000, "2×2=", "\ud800"))
    rows = [*sums(20), huge, odd, half]
    made = settings(written(tmp_path / "a.jsonl", rows), eval_files=written(tmp_path / "b.jsonl", sums(1, 50)))
    made.check()
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "3 of 24 prompts are set aside" in warned[0]
    assert "max_prompt_tokens = 40, the longest has 5000000; raise it" in warned[0]
    assert "a.jsonl, line 22" in warned[0]
    assert made.spec().training_states == 20
    batch = made.build(1)
    batch.reset([0], [0], [1])
    actions = batch.expert_actions([0])
    metrics = batch.step([0], actions).metrics
    assert metrics["verifier_failed"].tolist() == [0.0]
    with pytest.raises(ConfigError, match=r"all prompts of training are.* = 3, the longest has 6; raise"):
        settings(written(tmp_path / "c.jsonl", sums(9, 10)), held_out=0.5, max_prompt_tokens=3).spec()


def test_a_template_has_the_prompt_and_keeps_other_braces(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", sums(20))
    made = settings(file, held_out=0.5, template="{prompt} in \\boxed{answer}:", prompt="question")
    row = made.data().training[0]
    assert made.shown(row) == f"{row.prompt} in \\boxed{{answer}}:"
    with pytest.raises(ValueError, match=r"it has no \{prompt\}"):
        settings(file, template="Q:")


def test_prompts_keep_the_contract(tmp_path: Path) -> None:
    made = settings(written(tmp_path / "a.jsonl", sums(40)), held_out=0.3)
    findings = list(check_contract(made, 4, lambda _: None))
    assert [finding for finding in findings if finding.state != "ok"] == []


@pytest.mark.parametrize(
    ("verifier", "answer", "right", "wrong"),
    [
        (Exact(), "Paris", ["Paris", " Paris\n"], ["paris", "Paris.", ""]),
        (Exact(casefold=True), "Paris", ["PARIS"], ["Pari"]),
        (Exact(), 72.0, ["72"], ["72.0"]),
        (Regex(pattern=r"#### (-?\d+)"), "3*24=72\n#### 72", ["#### 72", "#### 1 #### 72"], ["72", "#### 7", ""]),
        (Regex(pattern=r"#### (-?\d+)", message="#### {answer}"), "72", ["so #### 72"], ["72", "#### 72 #### 1"]),
        (Regex(pattern="yes|no", casefold=True), "yes", ["no, yes"], ["yes, no", "YES"]),
        (Json(), {"a": 1, "b": "x"}, ['{"a": 1.0, "b": "x", "c": 0}', 'I say ```json\n{"b": "x", "a": 1}\n```'], []),
        (Json(), {"a": 1, "b": "x"}, [], ['{"a": 1}', '{"a": true, "b": "x"}', "a", "[" * 100_000, "9" * 9_999, "1"]),
        (Json(fields=("a",)), '{"a": 1, "b": "x"}', ['{"a": 1, "b": "y"}'], ['{"b": "x"}']),
        (Json(), [1, 2], ["[1, 2]"], ["[2, 1]"]),
    ],
)
def test_verifiers_accept_the_right_messages_alone(
    verifier: VerifierSettings, answer: Any, right: list[str], wrong: list[str]
) -> None:
    made = verifier.open()
    try:
        for message in [verifier.written(answer), *right]:
            assert made.verify(message, answer, {}) == (1.0, ""), message
        for message in wrong:
            assert made.verify(message, answer, {}) == (0.0, ""), message
    finally:
        made.close()


def test_math_is_compared_by_value() -> None:
    pytest.importorskip("math_verify")
    made = Math().open()
    cases = [
        ("2", "\\boxed{2}", 1),
        ("72", "so it is 18, no: 72", 1),
        ("18", "so it is 18, no: 72", 0),
        ("0.5", "so \\boxed{\\frac{1}{2}} it is", 1),
        ("3*24=<<3*24=72>>72\n#### 72", "\\boxed{72}", 1),
        ("\\frac{\\sqrt{2}}{2}", "\\boxed{\\frac{1}{\\sqrt{2}}}", 1),
        ("72", "I do not know", 0),
        ("72", "", 0),
        ("72", "(" * 5_000, 0),
    ]
    found = list[float]()
    verdicts = (made.verify(said, answer, {}) for answer, said, _ in cases)
    thread = threading.Thread(target=lambda: found.extend(verdict.reward for verdict in verdicts))
    thread.start()  # as a station's
    thread.join()
    made.close()
    assert found == [right for _, _, right in cases]
    assert Math().written("3*24=72\n#### 72") == "3*24=72\n#### 72"
    assert Math().written("72") == "\\boxed{72}"


def test_a_hanging_comparison_counts_as_wrong_alone() -> None:
    pytest.importorskip("math_verify")
    made = Math(limit_s=0.5).open()
    assert made.verify("\\boxed{9^{9^{9^{9}}}}", "72", {}) == (0.0, "it took more than 0.5 s")
    assert made.verify("\\boxed{72}", "72", {}) == (1.0, "")
    made.close()


def test_math_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"env.verify = math: the package math-verify.*polyrhythm\[math\]"):
        settings(written(tmp_path / "a.jsonl", sums(20)), held_out=0.5, verify="math").check()


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "answer_checks" in " ".join(one.cmdline())]


def test_a_pattern_that_runs_away_is_ended_and_leaves_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verify = {"type": "regex", "pattern": "(a+)+$", "limit_s": 0.2}
    rows = [{"question": str(i), "answer": "aa"} for i in range(20)]
    made = settings(written(tmp_path / "a.jsonl", rows), held_out=0.5, verify=verify)
    first, second = made.conversation(), made.conversation()
    for _ in range(2):
        first.begin(0, 0)
        reply = first.reply("a" * 60 + "b")
        assert (reply.reward, reply.success, reply.metrics["verifier_failed"]) == (0.0, False, 1.0)
    assert len([one for one in caplog.records if "it took more than 0.2 s" in one.message]) == 1, "told once"
    second.begin(0, 1)
    assert second.reply("aa").reward == 1.0
    assert len(children()) == 1, "shared"
    children()[0].kill()
    time.sleep(0.1)
    assert second.reply("aa").reward == 1.0, "after its process was killed"
    process = children()
    first.close()
    assert children() == process, "the other row has it"
    assert second.reply("aa").reward == 1.0
    second.close()
    second.close()
    assert children() == []


@long(3, "a process that is killed in a comparison")
def test_the_process_of_a_verifier_ends_with_the_one_that_has_it(tmp_path: Path) -> None:
    """Also where that was killed, and a comparison runs."""
    program = (
        "import os, psutil; from polyrhythm.plugins.language.text.answer_verifiers import Regex\n"
        "made = Regex(pattern='(a+)+$', limit_s=1).open(); made.verify('a', 'a', {})\n"
        "import threading; threading.Timer(0.2, lambda: os.kill(os.getpid(), 9)).start()\n"
        "print(psutil.Process().children()[0].pid, flush=True); made.verify('a' * 60 + 'b', 'a', {})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -9
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)


def test_a_message_that_is_cut_has_a_number_in_every_metric(tmp_path: Path) -> None:
    made = settings(written(tmp_path / "a.jsonl", sums(20)), held_out=0.5, max_new_tokens=3)
    batch = made.build(2)
    batch.reset([0, 1], [0, 0], [0, 1])
    end, one = made.text_tokenizer().ends[0], made.text_tokenizer().encode("1")[0]
    result = batch.step([0, 1], np.array([[one, end, one], [one, one, one]])[:, :, None])
    assert result.metrics["cut"].tolist() == [0.0, 1.0]
    assert result.metrics["verifier_failed"].tolist() == [0.0, 0.0]


def scored(message: str, answer: Any, row: Any) -> Any:
    """A verifier of one's own."""
    if row["question"] == "raise":
        raise RuntimeError("no idea")
    return {"2": 1.0, "half": 0.5, "odd": float("nan")}.get(message, message == answer)


def test_a_function_of_ones_own_gives_the_reward(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", sums(20))
    made = settings(file, held_out=0.5, verify=f"{__name__}:scored")
    made.check()
    conversation = made.conversation()
    conversation.begin(0, 0)
    assert [conversation.reply(message).reward for message in ("half", "nothing")] == [0.5, 0.0]
    assert not conversation.reply("half").success
    with pytest.raises(ValueError, match=r"scored: it returned nan; return a finite number"):
        conversation.reply("odd")
    for path, told in (("no_such_module:f", "cannot be imported"), (f"{__name__}:nothing", "has no nothing")):
        with pytest.raises(ConfigError, match=told):
            settings(file, held_out=0.5, verify=path).check()
    rows = [{"question": text, "answer": "2"} for text in ("a", "b", "c", "raise")]
    with pytest.raises(ConfigError, match=r"at the answer of b.jsonl, line 4 it raised RuntimeError: no idea"):
        settings(written(tmp_path / "b.jsonl", rows), held_out=0.5, verify=f"{__name__}:scored").check()


def test_a_verifier_has_to_accept_the_answers_of_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*sums(95), *({"question": f"{i}?", "answer": "many"} for i in range(5))]
    file = written(tmp_path / "a.jsonl", rows)
    pattern = {"type": "regex", "pattern": r"^\d+$"}
    settings(file, verify=pattern).check()
    assert "does not accept 5 of 100 of the data's own answers, such as that of a.jsonl, line" in caplog.text
    assert "'many'" in caplog.text
    with pytest.raises(ConfigError, match=r"env.verify = regex: it does not accept 5 of 100 .*lower env.min_verified"):
        settings(file, verify=pattern, min_verified=0.96).check()
    with pytest.raises(ConfigError, match=r"does not accept 100 of 100 .*in the message '\d+'"):
        settings(file, verify={"type": "regex", "pattern": r"#### (.*)"}).check()
    settings(file, verify={"type": "regex", "pattern": r"#### (.*)", "message": "#### {answer}"}).check()
    with pytest.raises(ValueError, match=r"it is not a regular expression"):
        settings(file, verify={"type": "regex", "pattern": "("})


def test_exact_on_worked_solutions_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{i}", "answer": "so " * 50 + f"#### {i}"} for i in range(20)]
    settings(written(tmp_path / "a.jsonl", rows), held_out=0.5, max_new_tokens=512).check()
    assert "a typical answer has 15" in caplog.text


def test_answers_that_no_message_can_have_are_refused(tmp_path: Path) -> None:
    for answer, told in (("a" * 9, r"it has 10 tokens with its end, env.max_new_tokens is 9"), ("é", r"has no id|'é'")):
        rows = [{"question": f"{i}", "answer": answer} for i in range(20)]
        with pytest.raises(ConfigError, match=told):
            settings(written(tmp_path / "a.jsonl", rows), held_out=0.5, max_new_tokens=9).check()
    settings(written(tmp_path / "a.jsonl", rows), held_out=0.5, verify="json").check()


def test_without_a_verifier_a_scorer_gets_the_answer(tmp_path: Path) -> None:
    rows = [{"question": f"{i}", "answer": {"rubric": [i]}} for i in range(20)]
    made = settings(written(tmp_path / "a.jsonl", rows), held_out=0.5, verify="none")
    made.check()
    conversation = made.conversation()
    prompt = conversation.begin(0, 4)
    assert conversation.reply('{"rubric": [4]}').reward == 0.0
    assert made.reference(4) == {"rubric": [int(prompt)]}
    assert made.reference(3 | HELD_OUT) in [row["answer"] for row in rows]


def test_settings_that_contradict_each_other_are_refused() -> None:
    for others, told in (
        ({"max_turns": 2}, "max_turns = 2: a prompt is answered in one message"),
        ({"eval_files": "b.jsonl", "held_out": 0.1}, "held_out = 0.1: eval_files are what is held out"),
        ({"verify": "maths"}, "maths"),
        ({"held_out": 0.0}, "held_out"),
        ({"files": ()}, "files"),
    ):
        with pytest.raises(ValueError, match=told):
            settings(**{"files": "a.jsonl", **others})


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    made = settings(written(tmp_path / "a.jsonl", sums(30)), held_out=0.5)
    before = made.spec().training_states
    written(tmp_path / "a.jsonl", sums(60))
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert made.spec().training_states > before


def test_prompts_with_several_answers_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*sums(40), *sums(40), {"question": "3+3=", "answer": 7}, {"question": " 4+4= ", "answer": "9"}]
    rows += [{"question": "5+5=", "answer": 10.0}]
    settings(written(tmp_path / "a.jsonl", rows), held_out=0.5).check()
    (told,) = (message for message in caplog.messages if "different answers" in message)
    assert told.startswith("env.files: 2 prompts have different answers in different rows, such as '")
    assert "'6' (a.jsonl, line 4), and 7 (a.jsonl, line 81)" in told or "'8' (a.jsonl, line 5), and '9'" in told
    caplog.clear()
    settings(written(tmp_path / "b.jsonl", sums(40) * 2), held_out=0.5).check()
    assert "different answers" not in caplog.text
