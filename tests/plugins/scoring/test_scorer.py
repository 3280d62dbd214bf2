"""The scorer station: what a reward function is given, what becomes of what it returns, several at a time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.runtime.arenas import holding

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.chains import ChainsSettings
from polyrhythm.plugins.scoring.reward_function import RewardFunction, WrongScore, as_score, load_reward
from polyrhythm.plugins.scoring.scorer import Scorer
from polyrhythm.runtime.messages import Channels
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import SampleScored, ScorerJoined, ScoreSample, ScoringFailed
from polyrhythm.specs import SampleView, Score, Trajectory
from polyrhythm.specs.scores import with_score

ENV = ChainsSettings(tool=True, max_turns=3, max_new_tokens=8)


def conversation(ticket: int = 0) -> Trajectory:
    """`8-2-1=`, the call `<8-2>`, the reply `6;`, the answer `#5`."""
    encode = ENV.text_tokenizer().encode
    contexts = ["8-2-1=", "8-2-1=<8-2>6;", "8-2-1=<8-2>6;"]
    tokens, length = np.zeros((3, ENV.max_prompt_tokens), np.int32), np.zeros(3, np.int32)
    for step, text in enumerate(contexts):
        length[step] = len(text)
        tokens[step, : len(text)] = encode(text)
    actions, valid = np.zeros((2, 8, 1), np.int64), np.zeros((2, 8), bool)
    for step, ids in enumerate((encode("<8-2>"), [*encode("#5"), 0])):
        actions[step, : len(ids), 0] = ids
        valid[step, : len(ids)] = True
    return Trajectory(
        obs={"tokens": tokens, "length": length, "turn": np.arange(3, dtype=np.int32)},
        actions=actions,
        logprob=np.zeros((2, 8, 1), np.float32),
        value=np.zeros(2, np.float32),
        forward_inputs={},
        rewards=np.zeros((2, 8), np.float32),
        valid=valid,
        version=np.zeros(2, np.int64),
        terminated=True,
        truncated=False,
        success=False,
        env_steps=2,
        ticket=ticket,
        group=0,
        task=0,
    )


class Stand:
    """A scorer with everything that it says."""

    def __init__(self, function, *, samples=1, places=1, overlap=False):
        self.said = []
        arena = holding([conversation(ticket) for ticket in range(samples)])
        channels = Channels(self.said.append, print, print)
        reward = RewardFunction("scoring.function = own:judge", function)
        spec = ENV.spec()
        self.scorer = Scorer("scorer-0", 2, reward, ENV, spec, arena, channels, places, overlap=overlap)

    def score(self, ticket=0, number=7, payload_id="", *, evaluation=False):
        self.scorer.handle(ScoreSample("scorer-0", number, ticket, payload_id or str(ticket), 0, 41, evaluation))


def test_a_reward_function_sees_the_conversation():
    seen: list[SampleView] = []
    stand = Stand(lambda sample: seen.append(sample) or 1)
    assert stand.scorer.joined() == ScorerJoined("scorer-0", 2, 1)
    stand.score()
    assert stand.scorer.work()
    assert stand.said == [SampleScored("scorer-0", 2, 7, 0, 1.0, None)]
    (sample,) = seen
    assert (sample.task, sample.seed, sample.prompt) == ("chains", 41, "8-2-1=")
    assert (sample.messages, sample.reply) == (("<8-2>", "#5"), "#5")
    assert sample.text == "8-2-1=<8-2>6;#5"
    assert (sample.terminated, sample.success, sample.episode_return, sample.evaluation) == (True, False, 0.0, False)
    with pytest.raises(ValueError, match="read-only"):
        sample.trajectory.rewards[0, 0] = 1.0
    assert not stand.scorer.work(), "there is no more"


def test_a_problem_can_be_made_again_from_its_seed():
    """It gets the ticket's seed, as the environment did, in evaluations too."""
    seeds = []
    stand = Stand(lambda sample: seeds.append(sample.seed) or 0, samples=2)
    stand.score(0, 1)
    stand.scorer.work()
    stand.score(1, 2, evaluation=True)
    stand.scorer.work()
    assert seeds == [41, 41]


@pytest.mark.parametrize(
    ("value", "score"),
    [(2, Score(2.0)), (True, Score(1.0)), (np.float32(0.5), Score(0.5)), (Score(1, True), Score(1.0, True))],
)
def test_numbers_and_scores_are_scores(value, score):
    assert as_score(value) == score


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], Score("1")])
def test_anything_else_is_none(value):
    with pytest.raises(WrongScore, match="return a finite number, or a Score"):
        as_score(value)


def test_what_raises_fails_its_sample_alone():
    def judge(sample):
        raise SystemExit("no") if sample.trajectory.ticket == 0 else ValueError("no opinion")

    stand = Stand(judge, samples=2)
    stand.score(0, 7)
    assert stand.scorer.work()
    stand.score(1, 8)
    assert stand.scorer.work()
    first, second = stand.said
    assert isinstance(first, ScoringFailed)
    assert first.error == "scoring.function = own:judge: SystemExit: no"
    assert second.error == "scoring.function = own:judge: ValueError: no opinion"
    assert second.detail.startswith("task chains, seed 41 (")
    assert stand.scorer.statistics() | {"busy_s": 0.0} == {"scored": 0.0, "scoring_failed": 2.0, "busy_s": 0.0}


def test_a_sample_that_is_gone_has_no_score():
    stand = Stand(lambda _: 1.0)
    stand.score(ticket=5, payload_id="0")
    assert stand.scorer.work()
    assert stand.said == [
        ScoringFailed(
            *("scorer-0", 2, 7, 5),
            "scoring.function = own:judge: the sample is not there any more",
            "task chains, seed 41",
        )
    ]


def test_several_samples_are_scored_at_a_time():
    together = threading.Barrier(3)
    stand = Stand(lambda sample: together.wait(60) * 0 + sample.trajectory.ticket, samples=3, places=3, overlap=True)
    for ticket in range(3):
        stand.score(ticket, ticket)
    with pytest.raises(UnfitMessage):
        stand.score(0, 9)  # it has three places
    until = time.monotonic() + 60
    while len(stand.said) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(event.score for event in stand.said) == [0.0, 1.0, 2.0]
    assert stand.scorer.current_call() == ("", 0.0)
    stand.scorer.close()


def test_the_call_that_has_lasted_longest_is_named():
    inside, go_on = threading.Event(), threading.Event()

    def judge(_):
        inside.set()
        go_on.wait(60)
        return 0.0

    stand = Stand(judge)
    stand.score()
    thread = threading.Thread(target=stand.scorer.work)
    begin = time.monotonic()
    thread.start()
    assert inside.wait(60)
    call, since = stand.scorer.current_call()
    assert call == "score"
    assert begin <= since <= time.monotonic()
    assert stand.scorer.pending_work() == ["scorer-0 has 1 samples to score"]
    go_on.set()
    thread.join(60)
    assert stand.scorer.pending_work() == []


async def polite(sample):
    return 0.25


def scaled(sample, *, by=1.0):
    return by


class Judge:
    def __init__(self, low):
        self.low = low

    def __call__(self, sample):
        return self.low


HERE = "tests.plugins.scoring.test_scorer"


def test_functions_coroutines_and_classes_are_reward_functions():
    sample = None
    assert load_reward(f"{HERE}:scaled", {"by": 3.0})(sample) == 3.0
    assert load_reward(f"{HERE}:Judge", {"low": -1.0})(sample) == -1.0
    assert load_reward(f"{HERE}:polite", {})(sample) == 0.25


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        ("no_such_module:judge", {}, "cannot be imported"),
        (f"{HERE}:nothing", {}, "has no nothing; name a function of it"),
        (f"{HERE}:ENV", {}, "not a function"),
        (f"{HERE}:scaled", {"times": 2}, "cannot be called with a sample and scoring.options"),
        (f"{HERE}:Judge", {}, "making it with scoring.options raised TypeError"),
        (f"{HERE}:Stand", {"function": None}, "its objects cannot be called"),
    ],
)
def test_what_is_no_reward_function_is_told_before_the_start(path, options, why):
    with pytest.raises(ConfigError, match=rf"scoring.function = {path}: .*{why}"):
        load_reward(path, options)


def test_a_score_is_added_to_the_last_executed_action():
    sample = conversation()
    scored = with_score(sample, 2.0)
    assert scored.rewards[1].tolist() == [0, 0, 2.0, 0, 0, 0, 0, 0]
    assert not sample.rewards.any(), "what lies in shared memory stays as it is"
    assert scored.episode_return == 2.0
