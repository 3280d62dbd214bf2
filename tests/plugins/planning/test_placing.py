"""`polyrhythm plan RECIPE --gpus N`: the answer in words and as data, and what is refused, in a sentence each."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.long import long
from tests.plugins.planning.profiles import GB, RECIPE, profile, recipe

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.planning.arrangement import Arrangement, arrangement_of, changed_lines
from polyrhythm.plugins.planning.judge import predict
from polyrhythm.plugins.planning.placing import judge_own, moved_up, parse_devices, what_more_buys
from polyrhythm.plugins.planning.problem import problem_of
from polyrhythm.plugins.planning.profile import Profile

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
SMALL = ("training.mini_batch_samples=4", "training.minibatch_steps=0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the profile of the small recipe, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    small().save(tmp_path / "latency.profile.json")
    return tmp_path


def small() -> Profile:
    points = ((8, 0.1, 8 * GB), (160, 2.0, 8 * GB))
    return profile(recipe(*SMALL), chunk_steps=4, micro_batch=points, step=((1, 0.05), (8, 0.1)))


def plan(*words: str) -> int:
    return main(["plan", "latency", *words, *RECIPE, *SMALL])


def test_the_answer_has_settings_that_the_recipe_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rates = [one["samples_per_s"] for one in found["placements"]]
    assert rates[0] >= max(rates) * 0.99
    assert found["placements"][0]["lag_max"] <= 1
    assert set(found["more"]) == {"one more GPU", "one more generator", "twice the rows"}
    config = load_config("latency", [*RECIPE, *SMALL, *found["placements"][0]["settings"]])
    again = predict(small(), config, parse_devices("2", None))
    assert again.samples_per_s == pytest.approx(rates[0])
    assert found["own"] is None  # it is on the CPU, of which the profile has no times


def test_the_recipes_own_placement_is_compared_where_it_was_measured() -> None:
    own = ("placement.generators.devices=0", "placement.trainer.devices=1")
    problem = problem_of(small(), recipe(*SMALL, *own), parse_devices("2", None))
    found = judge_own(problem)
    assert found is not None
    assert 0 < found.samples_per_s <= problem.solve(first=2, most=4)[0].prediction.samples_per_s * 1.001
    half = problem_of(small(), recipe(*SMALL, own[0]), parse_devices("2", None))
    assert judge_own(half) is None


def test_the_answer_in_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus", "1") == 0
    text = capsys.readouterr().out
    assert text.startswith("latency on 1 x test, by the profile of 2026-11-28; predicted, not measured\n")
    assert re.search(r"^1 +\S+ +\d+/\d+/\d+ ", text, re.MULTILINE)
    assert "one more GPU: +" in text
    table = text.split("\n\n")[1].splitlines()
    assert all(len(line) <= 86 for line in table)
    explained = {*table[0].split()} - {"busy", "train", "sharing"}
    assert all(re.search(rf"{name}[:,]", text) for name in explained)
    _, _, command = text.partition("polyrhythm train latency ")
    settings = shlex.split(command.replace("\\\n", ""))
    names = [word.partition("=")[0] for word in settings]
    assert len(names) == len({*names})
    assert {word.partition("=")[0] for word in (*RECIPE, *SMALL)} <= {*names}
    assert load_config("latency", settings).training.mini_batch_samples == 4, "as it was planned"


REFUSED = {
    "no GPU for stations that need one": (["--gpus", "0"], "--gpus = 0: the profile has its generator and trainer on"),
    "not a number": (["--gpus", "many"], "--gpus = many: not a number of GPUs; write 8"),
    "GPUs do not divide": (["--gpus", "3", "--nodes", "2"], "does not divide by --nodes = 2; write --gpus 2,1"),
    "two numbers of nodes": (["--gpus", "2,2", "--nodes", "3"], "--gpus = 2,2 names 2 nodes; leave --nodes out"),
    "no such file": (["--gpus", "1", "--profile", "none.json"], "'none.json' is not a file; measure one with"),
    "nodes without GPUs": (["--nodes", "2"], "--nodes is for --gpus; add --gpus N, or leave it out"),
    "streams": (["--gpus", "1", "batching.type=streams"], "a profile has passes, not streams"),
    "another recipe": (["--gpus", "1", "env.action_dim=5"], "whose env differs from this one's; measure this one with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, why = REFUSED[case]
    own = [*RECIPE, *SMALL]
    if "batching.type=streams" in words:
        own = [word for word in own if not word.startswith("batching")]
    assert main(["plan", "latency", *own, *words]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert why in told


@pytest.mark.parametrize(
    ("station", "work", "lacks"),
    [("trainer", None, "micro_batch, optimizer_step of the trainer"), ("generator", "pass", "pass of the generator")],
)
def test_a_profile_that_lacks_something_is_refused(
    station: str, work: str | None, lacks: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((here / "latency.profile.json").read_text())
    own = content["stations"] if work is None else content["stations"][station]["works"]
    del own[work or station]
    (here / "less.json").write_text(json.dumps(content))
    assert plan("--gpus", "1", "--profile", "less.json") != 0
    assert f"profile: it lacks {lacks}" in " ".join(capsys.readouterr().err.split())


DAMAGED = {
    "unknown key": ({"flavour": 3}, "flavour: "),
    "negative": ({"weights": -1}, "weights: "),
    "another format": ({"format": 9}, "format: "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_profile_is_refused(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed, why = DAMAGED[case]
    content = json.loads((here / "latency.profile.json").read_text())
    (here / "odd.json").write_text(json.dumps(content | changed))
    assert plan("--gpus", "1", "--profile", "odd.json") != 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"profile 'odd.json': {why}" in told
    assert "measure one with `polyrhythm profile RECIPE`" in told


@long(2, "two searches")
def test_too_few_devices_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = small()
    machine = large.machine.model_copy(update={"device_memory": 45 * GB})
    large.model_copy(update={"machine": machine}).save(here / "large.json")
    assert plan("--gpus", "2", "--profile", "large.json") != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "--gpus = 2: no placement fits on 2 devices of 45 GB (at least: generator 11 GB, trainer 48 GB)" in told


def test_a_missing_profile_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan("--gpus", "1") != 0
    assert "there is no latency.profile.json; measure it with `polyrhythm profile latency`" in capsys.readouterr().err


@pytest.fixture
def own_recipe(here: Path) -> list[str]:
    """The words of a plan for a recipe that is a file in another folder."""
    (here / "my own").mkdir()
    (here / "my own" / "one.yaml").write_text("extends: latency\n", encoding="utf-8")
    return ["plan", "my own/one.yaml", "--gpus", "1", *RECIPE, *SMALL]


def test_remedies_name_a_recipe_as_it_was_given(own_recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = own_recipe
    assert main(words) != 0
    told = capsys.readouterr().err
    assert "there is no one.profile.json; measure it with `polyrhythm profile 'my own/one.yaml'`" in told
    words += ["--profile", "latency.profile.json"]
    assert main([*words, "env.action_dim=5"]) != 0
    assert "measure this one with `polyrhythm profile 'my own/one.yaml'`" in capsys.readouterr().err


@long(2, "a search")
def test_the_command_names_a_recipe_as_it_was_given(own_recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*own_recipe, "--profile", "latency.profile.json"]) == 0
    assert "polyrhythm train 'my own/one.yaml' " in capsys.readouterr().out


def test_devices_by_node() -> None:
    assert parse_devices("8", None).nodes == (("", 8),)
    assert parse_devices("8", 2).nodes == (("node-0", 4), ("node-1", 4))
    assert parse_devices("1,0", None).nodes == (("node-0", 1), ("node-1", 0))
    for wrong in ("", "-1", "2.5", "1,,2", "9" * 6):
        with pytest.raises(ConfigError, match="not a number of GPUs"):
            parse_devices(wrong, None)


PAGES_COMMANDS = [
    line.split()[1:]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"polyrhythm plan \w+ .*--gpus", line)
]


@long(60, "the three examples of docs/planning.md, searched whole")
@pytest.mark.parametrize("words", PAGES_COMMANDS, ids=lambda words: " ".join(words[1:5]))
def test_the_pages_commands_find_a_placement(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["placements"][0]
    assert best["samples_per_s"] >= 0.99 * max(one["samples_per_s"] for one in found["placements"]) > 0
    assert best["settings"]
    assert not any(one["over"] or one["halted"] for one in found["placements"])
    assert found["own"] is None, "the recipe names devices that are not there, or its profile has no times for them"


def test_the_page_has_three_examples() -> None:
    assert len(PAGES_COMMANDS) == 3


def on_host_of(gb: float, own: Profile | None = None) -> Profile:
    own = own or small()
    return own.model_copy(update={"machine": own.machine.model_copy(update={"memory": round(gb * GB)})})


@pytest.mark.parametrize(("simulators", "gb"), [(1, 3), (2, 3), (64, 3), (4, 500)])
def test_the_hosts_memory_is_searched_too(simulators: int, gb: float) -> None:
    """Each simulator takes a gigabyte of the host."""
    config = recipe(*SMALL, f"rollout.simulators={simulators}", f"rollout.rows={64 // simulators}")
    found = problem_of(on_host_of(gb), config, parse_devices("1", None)).solve(first=2, most=3)
    assert found[0].arrangement.simulators <= gb
    assert found[0].arrangement.all_rows == 64


def test_the_recipes_own_placement_is_judged() -> None:
    """64 rows of one simulator, though 2 to 16 would be the first."""
    config = recipe(*SMALL, "rollout.simulators=1", "rollout.rows=64")
    problem = problem_of(small(), config, parse_devices("1", None))
    assert 1 in [one.arrangement.simulators for one in problem.solve(first=2, most=2)]
    placed = problem.proposals()[5]
    config = load_config("latency", [*RECIPE, *SMALL, *changed_lines(config, placed)])
    problem = problem_of(small(), config, parse_devices("1", None))
    own = arrangement_of(config, parse_devices("1", None))
    assert own in [one.arrangement for one in problem.solve(first=2, most=2)]


def test_a_host_that_is_too_small_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_host_of(0.5).save(here / "narrow.json")
    assert plan("--gpus", "2", "--profile", "narrow.json") != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "no placement can run: the host would hold 1 of 0.5 GB; see" in told


@pytest.mark.parametrize("rows", [32, 64])
def test_train_takes_every_ranked_placement(rows: int) -> None:
    """A slot has 32 rows or more here, and a pass never fewer than a slot."""
    own = ("rollout.simulators=2", f"rollout.rows={rows}")
    config = recipe(*SMALL, *own)
    points = ((8, 0.1, 8 * GB), (160, 2.0, 8 * GB))
    costs = profile(config, chunk_steps=4, micro_batch=points, step=((1, 0.05), (8, 0.1)), simulators_on="cuda")
    for one in problem_of(costs, config, parse_devices("2", None)).solve(most=10):
        load_config("latency", [*RECIPE, *SMALL, *own, *changed_lines(config, one.arrangement)])


@pytest.mark.parametrize(("before", "found"), [((0,), (0,)), ((0, 1), (0, 1)), ((1, 2), (1, 3)), ((2, 3), (3, 4))])
def test_a_placement_stays_where_a_device_is_added_behind_it(before: tuple[int, ...], found: tuple[int, ...]) -> None:
    one = Arrangement(1, 1, 1, 8, generator_devices=before, trainer_devices=before)
    assert moved_up(one, 2).generator_devices == moved_up(one, 2).trainer_devices == found


@long(2, "a search")
def test_one_more_gpu_is_searched_as_long_as_the_others() -> None:
    """A device that helps nobody: the best placement is judged again, and nothing is found below it."""
    config = recipe(*SMALL)
    problem = problem_of(small(), config, parse_devices("2", None))
    best = problem.solve()[0]
    gains = dict(what_more_buys(problem, best))
    wider = problem_of(small(), config, parse_devices("3", None)).solve()[0]
    assert gains["one more GPU"] >= wider.prediction.samples_per_s / best.prediction.samples_per_s - 1 - 1e-9
    assert gains["one more GPU"] >= 0.0
