"""Several ranks compute what one computes, whatever the objective, and keep and publish what one keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.long import long
from tests.plugins.ranks.cases import (
    BallastPolicy,
    HeavyPolicy,
    built,
    first_gradients,
    flow_trajectories,
    lm_trajectories,
    policy_of,
    rank_statistics,
    trained,
)
from tests.plugins.ranks.pool import RankPool
from tests.training.adapted_run import collect as collect_adapted
from tests.training.adapted_run import small
from tests.training.test_learner import VARIANTS, stale
from tests.training.test_moments import collect as collect_normalised
from tests.training.test_moments import learner_of
from tests.training.test_require_batches import samples as grouped
from tests.training.toy import ToyPolicy, algorithm, collect
from torch import Tensor

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.losses import POLICY_LOSSES
from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.errors import RunFolderError
from polyrhythm.policies.form import published_state
from polyrhythm.specs import Trajectory
from polyrhythm.training.checkpoint import load
from polyrhythm.training.learner import STEPS
from polyrhythm.training.ranks import ONE_RANK

CASES = "tests.plugins.ranks.cases:"
SWEEP = [pytest.mark.slow, long(600, "every objective, advantage and level on several ranks")]
LEVELS = [("token", "chunk"), ("token", "action"), ("action", "chunk"), ("action", "action"), ("chunk", "chunk")]
#: One optimizer step of several micro-batches, its gradient not clipped; then one that no rank shares evenly.
TRAIN = {"minibatch_steps": 9, "micro_batch_steps": 3, "optimizer": {"lr": 1e-3, "grad_clip": None}}


def objectives() -> list[dict[str, Any]]:
    """Every loss x advantage x level that the settings allow."""
    found = []
    for loss, advantage, (logprob, reward) in itertools.product(POLICY_LOSSES, ADVANTAGES, LEVELS):
        settings = {"loss": loss, "advantage": advantage, "logprob_level": logprob, "reward_level": reward}
        if loss == "clip_cov":
            settings["loss"] = {"type": loss, "fraction": 0.3, "cov_low": 0.0}
        try:
            algorithm(**settings)
        except ValidationError:  # v_trace leaves the importance weight to the loss
            continue
        found.append(settings)
    return found


def ragged(seed: int, *, per_action: bool) -> list[Trajectory]:
    """Samples of 1 to 6 chunk steps by slightly other weights, in groups of 1 to 3 that do not stand together."""
    rng = np.random.default_rng(seed)
    behaviour = ToyPolicy(per_action=per_action, dtype=torch.float32)
    with torch.no_grad():
        behaviour.logits.bias[::2].add_(0.2)
    lengths = tuple(int(x) for x in rng.integers(1, 7, size=rng.integers(4, 8)))
    groups = rng.integers(0, 4, size=len(lengths)) * 1000
    samples = collect(behaviour, lengths, seed)
    return [replace(sample, group=int(group)) for sample, group in zip(samples, groups, strict=True)]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def cases_of(settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any], list[Trajectory]]]:
    return [(s, TRAIN, ragged(i, per_action=s.get("reward_level") == "action")) for i, s in enumerate(settings)]


OBJECTIVES = objectives()


@pytest.mark.parametrize(
    ("size", "strategy", "every"),
    [
        pytest.param(2, "replicate", 1, marks=long(15, "every objective on two replicas")),
        (2, "replicate", 7),
        (2, "shard", 11),
        pytest.param(4, "replicate", 12, marks=long(5, "four replicas")),
        pytest.param(4, "shard", 22, marks=long(5, "four shards")),
        *(pytest.param(*rest, 1, marks=SWEEP) for rest in ((2, "shard"), (4, "replicate"), (4, "shard"))),
    ],
)
def test_the_gradient_is_that_of_one_rank(pool: RankPool, size: int, strategy: str, every: int) -> None:
    """Every objective, or each `every`-th: more processes than cores take long."""
    cases = cases_of(OBJECTIVES)[::every]
    answers = pool.run(f"{CASES}first_gradients", size, strategy, cases=cases)
    for case, found, one in zip(cases, answers[-1], first_gradients(ONE_RANK, cases), strict=True):
        assert distance(found, one) <= 1e-5, case[0]


@settings(max_examples=6, deadline=None)
@given(
    objective=st.sampled_from(OBJECTIVES),
    seed=st.integers(100, 2**16),
    ranks=st.sampled_from([(2, "replicate"), (2, "shard"), (3, "replicate"), (4, "shard")]),
    minibatch=st.integers(4, 20),
    micro=st.integers(0, 5),
)
def test_any_samples_dealt_to_any_ranks_have_the_gradient_of_one(
    pool: RankPool, objective: dict[str, Any], seed: int, ranks: tuple[int, str], minibatch: int, micro: int
) -> None:
    train = TRAIN | {"minibatch_steps": minibatch, "micro_batch_steps": micro}
    case = (objective, train, ragged(seed, per_action=objective.get("reward_level") == "action"))
    found = pool.run(f"{CASES}first_gradients", *ranks, cases=[case])
    assert distance(found[-1][0], first_gradients(ONE_RANK, [case])[0]) <= 1e-5


def plain_case(settings: dict[str, Any], data: list[list[Trajectory]], **train: Any) -> dict[str, Any]:
    changes = {"per_action": settings.get("reward_level") == "action"}
    return {"kind": "toy", "changes": changes, "settings": settings, "train": train, "trajectories": data}


def compare(one: dict[str, Any], many: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    """The ranks agree to the bit, and with one rank to the tolerance, metrics included."""
    for other in many[1:]:
        assert all(torch.equal(x, other["weights"][name]) for name, x in many[0]["weights"].items())
        assert other["metrics"] == many[0]["metrics"]
    assert distance(many[0]["weights"], one["weights"]) <= tolerance
    for a, b in zip(many[0]["metrics"], one["metrics"], strict=True):
        assert 0.0 <= a.pop("train/actor/padded_fraction") < 1.0
        assert a == pytest.approx(b, rel=10 * tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("strategy", "first", "every"),
    [
        ("replicate", 0, 3),
        ("shard", 1, 3),
        pytest.param("replicate", 0, 1, marks=long(5, "every variant on two replicas")),
    ],
)
def test_whole_updates_and_their_metrics_are_those_of_one_rank(
    pool: RankPool, strategy: str, first: int, every: int
) -> None:
    """Ways to weigh, correct and select entries: tests/training/test_learner.py has the list."""
    cases = [
        plain_case(
            s, [stale(per_action=s.get("reward_level") == "action")], epochs=2, minibatch_steps=5, micro_batch_steps=2
        )
        for s in [*VARIANTS, {"early_stop_ratio": 1.001}, {"early_stop_ratio": 1.2}][
            first::every
        ]
    ]
    cases.append(plain_case({}, [stale()], epochs=4, minibatch_steps=5, max_kl=0.01, optimizer={"lr": 0.1}))
    answers = pool.run(f"{CASES}many_trained", 2, strategy, cases=cases)
    for case, *found in zip(cases, *answers, strict=True):
        compare(trained(ONE_RANK, **case), found)


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_micro_batches_by_tokens_may_be_more_on_one_rank_than_on_another(
    pool: RankPool, strategy: str, proximal: str
) -> None:
    settings = {"proximal": proximal, "loss": "decoupled_ppo" if proximal == "recompute" else "ppo"}
    data = [stale(), stale()]
    case = plain_case(settings, data, epochs=2, minibatch_steps=7, micro_batch_tokens=5) | {"kind": "counting"}
    found = pool.run(f"{CASES}trained", 2, strategy, **case)
    assert max(metrics["train/actor/padded_fraction"] for metrics in found[0]["metrics"]) > 0, "they differ"
    compare(trained(ONE_RANK, **case | {"train": case["train"] | {"micro_batch_tokens": 0}}), found)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "replicate"),
        (2, "shard"),
        pytest.param(4, "replicate", marks=long(5, "twenty updates of four replicas")),
        pytest.param(4, "shard", marks=long(5, "twenty updates of four shards")),
    ],
)
def test_a_run_of_twenty_updates_is_that_of_one_rank(pool: RankPool, size: int, strategy: str) -> None:
    data = [ragged(seed, per_action=False) for seed in range(20)]
    case = plain_case({"advantage": "grpo", "kl": {"coef": 0.05}}, data, minibatch_steps=8, critic_warmup_updates=2)
    one = trained(ONE_RANK, **case)
    compare(one, pool.run(f"{CASES}trained", size, strategy, **case))
    assert distance(one["weights"], policy_of("toy").state_dict()) > 0.01


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_what_has_no_gradient_is_left_as_it_is(pool: RankPool, strategy: str) -> None:
    """While the critic warms up the actor neither decays nor gets moments, and its first step is Adam's first."""
    optimizer = {"lr": 1e-3, "weight_decay": 0.1}
    case = plain_case({}, [ragged(1, per_action=False)], critic_warmup_updates=1, optimizer=optimizer)
    one, start = trained(ONE_RANK, **case), policy_of("toy").state_dict()
    for answer in pool.run(f"{CASES}trained", 2, strategy, **case):
        assert answer["state"]["optimizer"]["state"].keys() == one["state"]["optimizer"]["state"].keys()
        assert torch.equal(answer["weights"]["logits.weight"], start["logits.weight"])
        assert not torch.equal(answer["weights"]["critic.weight"], start["critic.weight"])


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_that_only_some_steps_reach_are_left_alone_in_the_others(pool: RankPool, size: int) -> None:
    """Also where the step that a rank pads with reaches them."""
    data = [ragged(seed, per_action=False) for seed in range(3)]
    case = {**plain_case({}, data, epochs=2, minibatch_steps=3, micro_batch_steps=1), "kind": "parts", "changes": {}}
    one = trained(ONE_RANK, **case)
    steps = [float(state["step"]) for state in one["state"]["optimizer"]["state"].values()]
    assert len(set(steps)) == 3, "all parameters but those of the parts have as many steps"
    for answer in pool.run(f"{CASES}trained", size, "replicate", **case):
        assert [float(state["step"]) for state in answer["state"]["optimizer"]["state"].values()] == steps
        assert distance(answer["weights"], one["weights"]) <= 1e-4


@pytest.mark.parametrize(("strategy", "copies"), [("replicate", 5.0), ("shard", 2.0)])
def test_ranks_give_up_their_memory_between_updates_and_go_on_as_if_they_had_not(
    pool: RankPool, strategy: str, copies: float, tmp_path: Path
) -> None:
    """Replicas: weights, reference, two moments, and the room for gradients of DDP; shards: half of the first four."""
    data = [ragged(seed, per_action=False) for seed in range(3)]
    case = {**plain_case({"kl": {"coef": 0.05}}, data, minibatch_steps=8), "kind": "heavy", "changes": {}}
    stayed = pool.run(f"{CASES}trained", 2, strategy, **case)
    left = pool.run(f"{CASES}trained", 2, strategy, **case, offload=str(tmp_path))
    for a, b in zip(stayed, left, strict=True):
        assert b["freed"] == pytest.approx(copies * 4 * HeavyPolicy.BALLAST, rel=0.02)
        assert same_state(a["state"], b["state"])


def test_replicas_keep_one_copy_of_their_gradients_beside_those_that_accumulate(pool: RankPool) -> None:
    """The first step makes the buckets as well; DDP makes them anew in the second one and frees the first ones."""
    data = ragged(0, per_action=False)
    in_turns = {"minibatch_steps": 5, "micro_batch_steps": 2}
    for growth in pool.run(f"{CASES}growth_by_step", 2, "replicate", train=in_turns, trajectories=data):
        assert growth == pytest.approx([2.0, 1.0, 1.0], abs=0.01)
    one_piece = 1 / BallastPolicy.PIECES
    for growth in pool.run(f"{CASES}growth_by_step", 2, "replicate", train={"minibatch_steps": 5}, trajectories=data):
        assert growth == pytest.approx([2.0, one_piece, one_piece], abs=0.01), "a gradient goes to its bucket at once"


@pytest.mark.parametrize("kind", ["toy", "ballast"])
def test_which_parameters_have_gradients_is_summed_with_the_last_gradients(pool: RankPool, kind: str) -> None:
    """One bucket or several: no optimizer step after the first, which has the update's targets, sums anything else."""
    data = ragged(0, per_action=False)
    for first, *others in pool.run(f"{CASES}sums_beside_gradients", 2, "replicate", kind=kind, trajectories=data):
        assert first
        assert others
        assert not any(others)


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_rank_without_samples_takes_part(pool: RankPool, strategy: str) -> None:
    alone = [replace(sample, group=1) for sample in collect(ToyPolicy(dtype=torch.float32), (3, 2))]
    case = plain_case({"proximal": "recompute", "bootstrap": "always"}, [alone], micro_batch_steps=2)
    compare(trained(ONE_RANK, **case), pool.run(f"{CASES}trained", 2, strategy, **case))


ADAPTED = {"kl": {"coef": 0.1}, "loss": "decoupled_ppo", "bootstrap": "always"}
LARGE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adapted", {"train": "all", "gradient_checkpointing": True}, {}),
    ("adapted", {"train": "expert"}, ADAPTED),
    ("adapted", {"train": "lora"}, ADAPTED),
    ("plain", {"train": "all"}, ADAPTED),
    ("flow", {"train": "all"}, {}),
    ("flow", {"train": "expert"}, {"advantage": "grpo", "kl": {"coef": 0.1}}),
    ("flow", {"train": "lora"}, {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}}),
]


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        pytest.param("replicate", 1, marks=long(5, "large policies, replicated")),
        ("shard", 3),
        pytest.param("shard", 1, marks=long(8, "large policies, sharded")),
    ],
)
def test_large_policies_have_the_gradient_of_one_rank(pool: RankPool, strategy: str, every: int) -> None:
    """Frozen parts, adapters, a prefix that is computed once, references with and without a copy."""
    cases = [
        {
            "kind": kind,
            "changes": changes,
            "settings": settings,
            "train": {"micro_batch_steps": 5, "optimizer": {"lr": 1e-9, "grad_clip": None}},
            "trajectories": [flow_trajectories() if kind == "flow" else collect_adapted(small())]
            * (2 if settings else 1),
            "shift": 0.02,
        }
        for kind, changes, settings in LARGE[::every]
    ]
    answers = pool.run(f"{CASES}many_trained", 2, strategy, cases=cases)
    for case, *found in zip(cases, *answers, strict=True):
        one = trained(ONE_RANK, **case)
        compare(one, found)
        assert distance(found[0]["gradient"], one["gradient"]) <= 1e-5, case["changes"]
        assert not case["settings"] or abs(one["metrics"][-1]["train/actor/reference_kl"]) > 1e-6


@pytest.mark.parametrize("strategy", [pytest.param("replicate", marks=long(4, "packed passes, replicated")), "shard"])
def test_a_language_models_packed_passes_have_the_gradient_of_one_rank(pool: RankPool, strategy: str) -> None:
    """Answers of many lengths, so that passes of at most so many tokens are more on one rank than on another, and
    logits are made some at a time."""
    grpo: dict[str, Any] = {"advantage": "grpo", "value": {"coef": 0.0}, "proximal": "recompute"}
    train = {"micro_batch_tokens": 60, "optimizer": {"lr": 1e-9, "grad_clip": None}}
    late: dict[str, Any] = {"advantage": "gae", "reward_level": "action", "value": {"coef": 0.5}}
    cases = [
        {"kind": "lm", "changes": changes, "settings": grpo | more, "train": train}
        | {"trajectories": [lm_trajectories(critic="value_head" in changes)] * (2 if more else 1), "shift": 0.02}
        for changes, more in (
            ({"logits_mib": 0.0005, "gradient_checkpointing": True}, {}),
            ({"train": "lora"}, {"kl": {"coef": 0.1}}),
            ({"value_head": True}, late),
            ({"value_head": True}, {**late, "proximal": "behavior"}),
        )
    ]
    answers = pool.run(f"{CASES}many_trained", 2, strategy, cases=cases)
    for case, *found in zip(cases, *answers, strict=True):
        one = trained(ONE_RANK, **case)
        assert found[0]["metrics"][0]["train/actor/padded_fraction"] > 0, "passes differ in number"
        assert ("train/actor/mismatch_kl" in one["metrics"][0]) == (case["settings"]["proximal"] == "recompute")
        compare(one, found)
        assert distance(found[0]["gradient"], one["gradient"]) <= 1e-5


GOLDEN = Path(__file__).parents[1] / "vla" / "golden"
RELEASED = {"type": "pi0", "checkpoint": str(GOLDEN / "pi0"), "tokenizer": "words", "robot": "bounds"}


@pytest.mark.parametrize("changes", [{"train": "expert", "dtype": "float32"}, {"train": "lora", "dtype": "float32"}])
def test_a_rank_reads_a_checkpoint_block_by_block(pool: RankPool, changes: dict[str, Any]) -> None:
    """It never has more than a block of the policy whole, and shares the policy that one rank has."""
    settings = RELEASED | changes
    one = built(ONE_RANK, settings)
    for answer in pool.run(f"{CASES}built", 2, "shard", settings=settings):
        assert all(torch.equal(x, answer["weights"][name]) for name, x in one["weights"].items())
        assert distance(answer["gradient"], one["gradient"]) <= 1e-5
        assert answer["whole"] < 0.7
    assert one["whole"] == 1.0


FORGOTTEN = {
    "parameter": "policy: trunk.0.weight has no value when it is to be divided among the ranks; read it in load_part",
    "buffer": "policy: trunk.scale has no value when it is to be divided",
    "plain": "policy: trunk.tables['scale'][0] is a tensor on meta, but neither parameter nor buffer, so it",
}


@pytest.mark.parametrize("defect", FORGOTTEN)
def test_a_tensor_that_was_not_read_or_cannot_be_moved_is_refused_by_name(pool: RankPool, defect: str) -> None:
    for said in pool.run(f"{CASES}sharded_with", 2, "shard", defect=defect):
        assert said.startswith(FORGOTTEN[defect])


OPTIONS = [
    pytest.param(ShardSettings(reshard=False), marks=long(2, "shards that stay whole between passes")),
    ShardSettings(cpu_offload=True),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_shard_change_nothing(pool: RankPool, options: ShardSettings) -> None:
    optimizer = {"lr": 1e-3, "offload": True}
    train = {"epochs": 2, "minibatch_steps": 7, "optimizer": optimizer}
    case = {"kind": "adapted", "changes": {"train": "expert"}, "settings": ADAPTED, "train": train}
    data = [collect_adapted(small())] * 2
    plain = pool.run(f"{CASES}trained", 2, "shard", **case, trajectories=data)
    other = pool.run(f"{CASES}trained", 2, "shard", options, **case, trajectories=data)
    assert distance(plain[0]["weights"], other[0]["weights"]) == 0.0
    assert plain[0]["metrics"] == other[0]["metrics"]


def same_state(a: Any, b: Any) -> bool:
    """Bit-equal, of the same keys and types."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else type(a) is type(b) and a == b


STATE = {"kind": "plain", "changes": {"train": "expert"}, "settings": ADAPTED, "train": {}}


def test_a_state_saved_by_two_ranks_is_loaded_by_any_number(pool: RankPool, tmp_path: Path) -> None:
    folder, data = tmp_path / "trainer-00000002", [collect_adapted(small())]
    saved = pool.run(f"{CASES}trained", 2, "shard", **STATE, trajectories=data * 2, save=str(folder))[0]["state"]
    assert saved["updates"] == 2
    assert {".metadata", "index", "__0_0.distcp", "__1_0.distcp"} == {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "nothing unfinished is left"
    assert same_state(load(folder), saved)
    assert same_state(trained(ONE_RANK, **STATE, trajectories=[], load=str(folder))["state"], saved)
    for size, strategy in ((2, "shard"), (4, "shard"), (2, "replicate")):
        for answer in pool.run(f"{CASES}trained", size, strategy, **STATE, trajectories=[], load=str(folder)):
            assert same_state(answer["state"], saved)


def test_a_folder_is_written_beside_an_update_from_what_was_there_before(pool: RankPool, tmp_path: Path) -> None:
    case = {"path": str(tmp_path / "s"), "trajectories": ragged(0, per_action=False)}
    for before, pending in pool.run(f"{CASES}saved_late_by_rank_1", 2, "shard", **case):
        assert pending
        saved = load(tmp_path / "s")
        assert saved["updates"] == 1
        rows = before["trunk.0.weight"].chunk(2)
        assert torch.equal(saved["policy"]["trunk.0.weight"].chunk(2)[0], rows[0]), "rank 0's part is of its moment"
        assert not torch.equal(saved["policy"]["trunk.0.weight"].chunk(2)[1], rows[1]), "rank 1's of a later one"


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_file_of_one_rank_is_loaded_by_two_which_go_on_as_one_would(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    data = [stale()] * 2
    case = plain_case({"kl": {"coef": 0.1}}, data, optimizer={"lr": 1e-3})
    saved = trained(ONE_RANK, **case, save=str(tmp_path / "one.pt"))["state"]
    loaded = pool.run(f"{CASES}trained", 2, strategy, **{**case, "trajectories": []}, load=str(tmp_path / "one.pt"))
    assert all(same_state(answer["state"], saved) for answer in loaded)
    on = {**case, "load": str(tmp_path / "one.pt")}
    compare(trained(ONE_RANK, **on), pool.run(f"{CASES}trained", 2, strategy, **on))


def test_replicas_are_saved_as_the_one_file_of_one_rank(pool: RankPool, tmp_path: Path) -> None:
    case = plain_case({}, [stale()])
    saved = pool.run(f"{CASES}trained", 2, "replicate", **case, save=str(tmp_path / "two.pt"))[0]["state"]
    assert same_state(load(tmp_path / "two.pt"), saved)


def test_ranks_write_nothing_before_rank_0_saves(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(f"{CASES}saved_late_by_rank_0", 2, "shard", path=str(tmp_path / "s")) == [False, False]


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = pool.run(f"{CASES}saved_to", 2, "shard", path=str(tmp_path / "file" / "state"))
    assert answers == ["NotADirectoryError"] * 2


def test_a_folder_that_is_damaged_or_executes_something_is_refused(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    pool.run(f"{CASES}trained", 2, "shard", **plain_case({}, [stale()]), save=str(folder))
    assert load(folder)["updates"] == 1
    (folder / ".metadata").unlink()  # a pickle, which nothing of ours reads
    part, index = folder / "__1_0.distcp", folder / "index"
    written, places = part.read_bytes(), index.read_text()
    shard = load(folder)["policy"]["trunk.0.weight"][8:].numpy().tobytes()
    assert shard in written
    for said, file, content in (
        ("__1_0.distcp is absent or too short", part, written[:-100]),
        ("policy/trunk.0.weight in it is damaged", part, written.replace(shard, bytes(len(shard)))),
        ("malformed node", index, b"__import__('os').abort()"),
        ("was never closed", index, places.encode()[:-5]),
        ("is not the name of a file inside", index, places.replace("__1_0", "../__1_0").encode()),
    ):
        file.write_bytes(content)
        with pytest.raises(RunFolderError, match=rf"cannot be read as a checkpoint \(.*{said}"):
            load(folder)
        part.write_bytes(written)
        index.write_text(places)
    assert load(folder)["updates"] == 1


@pytest.mark.parametrize(("kind", "changes"), [("toy", {}), ("adapted", {"train": "lora"}), ("flow", {"train": "all"})])
def test_a_sharded_policy_publishes_whole_weights_in_order(pool: RankPool, kind: str, changes: dict[str, Any]) -> None:
    case = {"kind": kind, "changes": changes, "settings": {}, "train": {}, "trajectories": []}
    expected = published_state(policy_of(kind, **changes))
    for answer in pool.run(f"{CASES}trained", 2, "shard", **case):
        assert list(answer["weights"]) == list(expected)
        assert all(torch.equal(x, answer["weights"][name]) for name, x in expected.items())


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_what_is_not_finite_on_one_rank_halts_all_with_its_cause(pool: RankPool, strategy: str) -> None:
    """Group 0 is dealt to rank 0, group 1 to rank 1, which alone sees the reward or the last observation."""
    good = [
        replace(sample, group=i % 2) for i, sample in enumerate(collect(ToyPolicy(dtype=torch.float32), (4, 3, 2, 2)))
    ]
    rewards = good[1].rewards.copy()
    rewards[1] = np.nan
    bad_reward = [good[0], replace(good[1], rewards=rewards), *good[2:]]
    cases = [plain_case(settings, [bad_reward]) for settings in ({}, {"normalize_advantage": False})]
    cases.append({**plain_case({}, [good]), "changes": {"value_of_last": float("nan")}, "kind": "odd"})
    causes = ["the environment gave a reward of NaN or infinity"] * 2
    causes.append("policy.value gives NaN or infinity for the last observation of a sample")
    for found in zip(cases, causes, *pool.run(f"{CASES}many_trained", 2, strategy, cases=cases), strict=True):
        case, cause, *answers = found
        start = policy_of("toy").state_dict()
        for answer in answers:
            assert cause in answer["halt"], case
            assert distance(answer["weights"], start) == 0.0


@pytest.mark.parametrize("strategy", [pytest.param("replicate", marks=long(5, "mini-batches of replicas")), "shard"])
def test_two_ranks_take_the_steps_of_one_in_each_mini_batch(pool: RankPool, strategy: str) -> None:
    """A mini-batch of one group has nothing for one of them; the others are dealt each by itself."""
    cases = [
        plain_case({"advantage": "grpo"}, [grouped()], mini_batch_samples=m, require_batches=16 // m) for m in (8, 4, 2)
    ]
    answers = pool.run(f"{CASES}many_trained", 2, strategy, cases=cases)
    for case, *found in zip(cases, *answers, strict=True):
        one = trained(ONE_RANK, **case)
        assert one["metrics"][0][STEPS] == case["train"]["require_batches"] == found[0]["metrics"][0][STEPS]
        compare(one, found)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(2, "replicate"), (2, "shard"), pytest.param(4, "replicate", marks=long(4, "statistics of four ranks"))],
)
def test_statistics_are_those_of_one_rank(pool: RankPool, size: int, strategy: str) -> None:
    """The third update has fewer samples than ranks."""
    policy, _ = learner_of()
    data = [
        collect_normalised(policy, lengths, seed) for seed, lengths in enumerate([(6, 7, 4, 5), (1, 9, 2, 2), (3,)])
    ]
    one = rank_statistics(ONE_RANK, data)
    for found in pool.run(f"{CASES}rank_statistics", size, strategy, trajectories=data):
        assert found["train/critic/reward_scale"] == pytest.approx(one["train/critic/reward_scale"], rel=1e-9)
        for name in ("count", "mean", "variance"):
            np.testing.assert_allclose(found[name], one[name], rtol=1e-9, atol=1e-15)


def test_ranks_of_other_weights_are_refused(pool: RankPool) -> None:
    """The last test, as the next one would start all ranks anew."""
    with pytest.raises(AssertionError, match=r"ConfigError: policy: rank 1 built another trunk\.0\.weight than rank 0"):
        pool.run(f"{CASES}of_own_seeds", 2)
