import json
from pathlib import Path

import pytest

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.virtual.simulate import load_cluster, simulate_file

EXAMPLES = Path(__file__).parents[4] / "examples" / "clusters"
SMALL = """
versions: 1
scheduler: {batch_size: 2}
simulators: [{rows: 2, step: 10ms, steps: 3}]
generators: [{serve: 5ms}]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_simulated_to_plain_json(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    summary = simulate_file(write(tmp_path, SMALL), trace_path=trace)
    assert summary["versions"] == 1
    assert json.loads(json.dumps(summary)) == summary
    assert json.loads(trace.read_text(encoding="utf-8"))


def test_the_small_example_keeps_eight_gpus_within_its_lag() -> None:
    summary = simulate_file(EXAMPLES / "small.yaml")
    assert summary["gpus"] == 8
    assert summary["versions"] == 20
    assert summary["lag"]["max"] <= 2


def test_in_the_shared_example_every_device_has_work() -> None:
    summary = simulate_file(EXAMPLES / "shared.yaml")
    assert summary["gpus"] == 8
    assert len(summary["devices"]) == 8
    assert min(summary["devices"].values()) > 0.5


def test_the_large_example_is_256_gpus_and_2048_env_batches() -> None:
    settings = load_cluster(EXAMPLES / "large.yaml")
    assert settings.gpus == 256
    assert sum(group.count * group.env_batches for group in settings.simulators) == 2048
    assert settings.versions == 10


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("step: 10ms", "stepp: 10ms", r"simulators\.0\.stepp = '10ms': no such key; did you mean step\?"),
        ("scheduler:", "flow:", r"^[^=]*flow: no such key; it is now called scheduler$"),
        (
            "versions: 1",
            "evaluations: [{at: 1s, beside: false}]",
            r"beside = false: no such key; it is now called background",
        ),
        ("step: 10ms", "step: 10", r"simulators\.0\.step = 10: cost 10 is not text; write a duration"),
        (
            "serve: 5ms",
            "serve: 5 parsecs",
            r"generators\.0\.serve = '5 parsecs': duration .* is not a number with a unit",
        ),
        (
            "batch_size: 2",
            "batchsize: 2",
            r"scheduler\.batch_size is missing; add it|scheduler\.batchsize = 2: no such key",
        ),
        (
            "batch_size: 2",
            "batch_size: 2, group_size: 3",
            r"scheduler = .*batch_size 2 is not a multiple of group_size 3",
        ),
        (
            "steps: 3",
            "steps: 3, segment_steps: 2",
            r"segment_steps above 0 but scheduler\.segments is false; set it to true",
        ),
        ("versions: 1", "versions: 0", r"versions = 0: .*greater than or equal to 1"),
        (
            "versions: 1",
            "faults: [{station: generator-9, at: 1s}]",
            r"there is no such station; write one of simulator-0",
        ),
        ("versions: 1", "colour: red", r"colour = 'red': no such key"),
        ("rows: 2", "reserved: 2", r"reserved 2 is more than env_batches 1; raise env_batches"),
        ("rows: 2", "reserved: 1", r"all env batches are reserved for evaluations; training needs one"),
        ("versions: 1", "evaluations: [{at: 1}]", r"evaluations\.0\.at = 1: duration 1 has no unit"),
        ("versions: 1", "evaluations: [{at: 1s, size: 3}]", r"evaluations\.0\.size = 3: no such key"),
        ("versions: 1", "evaluations: [{at: 1s}]", r"scheduler\.evaluator is empty; name one"),
        (
            "scheduler: {batch_size: 2}",
            "scheduler: {batch_size: 2, evaluator: generator-0}\nevaluations: [{at: 1s}]",
            r"no env batch is reserved for it; set reserved",
        ),
        (
            "batch_size: 2",
            "batch_size: 2, evaluator: trainer",
            r"there is no such generator; write one of \['generator-0",
        ),
        (
            "batch_size: 2",
            "batch_size: 2, evaluator: generator-0, evaluator_only: true",
            r"scheduler\.evaluator_only leaves no generator for training; add one",
        ),
    ],
)
def test_a_wrong_file_says_what_value_and_remedy(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(write(tmp_path, SMALL.replace(old, new)))


def test_a_file_that_is_no_mapping_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a list; write sections"):
        load_cluster(write(tmp_path, "- 1"))
    with pytest.raises(ConfigError, match="line 1, column 5: expected the node content"):
        load_cluster(write(tmp_path, "a: ["))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "nowhere.yaml")


def test_queue_scheduling_and_redundant_prompts_beat_batch_rollout_as_in_roll_flash() -> None:
    batch, queue = (simulate_file(EXAMPLES / f"{name}.yaml") for name in ("batch_rollout", "queue_scheduling"))
    assert batch["throughput"]["updates"] == queue["throughput"]["updates"] == 10
    assert batch["virtual_s"] > 3 * queue["virtual_s"], "ROLL Flash, figure 7: 125 s against 37 s per step"
    assert batch["utilisation"]["generator"] < 0.5 < queue["utilisation"]["generator"]
    assert queue["throughput"]["tokens_aborted"] > 0 == batch["throughput"]["tokens_aborted"]
