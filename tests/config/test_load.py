"""Recipes: extends, merge, overrides, where they are found, and that saving gives the same run back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyrhythm.config.load import load_config, merge, parse_override, save_config
from polyrhythm.config.recipes import find_recipe, parse, read, recipe_names
from polyrhythm.errors import ConfigError

RECIPE = """
seed: 5
env: {type: latency}
policy: {type: gaussian}
training: {versions: 2, mini_batch_samples: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(RECIPE)
    return tmp_path


def test_overrides_are_yaml_and_win(folder: Path) -> None:
    config = load_config("base.yaml", ["training.versions=7", "training.optimizer.lr=1e-3", "rollout.sharding=[3, 5]"])
    assert (config.training.versions, config.training.optimizer.lr) == (7, 1e-3)
    assert config.rollout.sharding == (3, 5)
    assert config.seed == 5


def test_a_key_of_a_mapping_may_be_a_path(folder: Path) -> None:
    given = {"training.versions": 7, "training": {"optimizer": {"lr": 1e-3}}, "training.optimizer.grad_clip": 2.0}
    training = load_config("base.yaml", [given, "training.epochs=3"]).training
    optimizer = training.optimizer
    assert (training.versions, training.epochs, optimizer.lr, optimizer.grad_clip) == (7, 3, 1e-3, 2.0)
    assert load_config({"extends": "base.yaml", "training.versions": 8}).training.versions == 8
    with pytest.raises(ConfigError, match=r"key 'training\.': it must look like section\.key"):
        load_config("base.yaml", [{"training.": 3}])


def test_the_name_is_the_recipes_own_and_not_inherited(folder: Path) -> None:
    (folder / "named.yaml").write_text("extends: base\nname: special\n")
    (folder / "child.yaml").write_text("extends: named.yaml\n")
    assert load_config("base.yaml").name == "base"
    assert load_config("named.yaml").name == "special"
    assert load_config("child.yaml").name == "child"
    assert load_config("child.yaml", ["name=mine"]).name == "mine"


def test_extends_merges_deep_and_relative(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "child.yaml").write_text("extends: ../base.yaml\ntraining: {versions: 9}\n")
    training = load_config("sub/child.yaml").training
    assert (training.versions, training.mini_batch_samples) == (9, 4)


def test_extends_by_the_name_of_a_packaged_recipe(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: quickstart\nseed: 77\n")
    tree = read(find_recipe("quickstart"))
    assert load_config("mine.yaml").seed == 77
    assert load_config("mine.yaml").training.versions == tree["training"]["versions"]


def test_a_circle_of_extends_is_named(folder: Path) -> None:
    (folder / "a.yaml").write_text("extends: b\n")
    (folder / "b.yaml").write_text("extends: a\n")
    with pytest.raises(ConfigError, match=r"a\.yaml → b\.yaml → a\.yaml"):
        load_config("a.yaml")


def test_a_changed_type_replaces_the_section() -> None:
    old = {"batching": {"type": "dynamic", "max_rows": 3}, "seed": 1}
    assert merge(old, {"batching": {"type": "lockstep"}}) == {"batching": {"type": "lockstep"}, "seed": 1}
    assert merge(old, {"batching": {"max_wait_ms": 1}})["batching"] == {
        "type": "dynamic",
        "max_rows": 3,
        "max_wait_ms": 1,
    }
    assert old == {"batching": {"type": "dynamic", "max_rows": 3}, "seed": 1}


def test_settings_that_go_with_another_type_are_told(caplog: pytest.LogCaptureFixture) -> None:
    recipe = {"extends": "cartpole", "policy": {"type": "categorical", "hidden": 32}}
    assert load_config(recipe, ["policy.hidden=16"]).policy.hidden == 16  # type: ignore[attr-defined]
    assert caplog.records == []
    assert load_config(recipe, ["policy.type=gaussian"]).policy.hidden == 64  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert record.getMessage() == (
        "policy.type = gaussian, the recipe has categorical: its settings hidden go with it; give what is to stay, as "
        "in policy.hidden=..."
    )


def test_the_short_form_of_an_env_takes_overrides() -> None:
    merged = merge({"env": "gymnasium:CartPole-v1"}, {"env": {"max_steps": 9}})
    assert merged == {"env": {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 9}}
    assert merge({"env": {"type": "latency"}}, {"env": "gymnasium:X"}) == {"env": "gymnasium:X"}


def test_overrides_given_in_any_order_mean_the_same(folder: Path) -> None:
    one = load_config("base.yaml", ["batching.max_rows=9", "batching.type=dynamic"])
    other = load_config("base.yaml", ["batching.type=dynamic", "batching.max_rows=9"])
    assert one == other


@pytest.mark.parametrize("text", ["training.versions", "=3", "a..b=3", ".a=3"])
def test_an_override_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


def test_an_override_keeps_later_equals_signs() -> None:
    assert parse_override("rollout.queue_key=a=b") == {"rollout": {"queue_key": "a=b"}}


def test_a_wrong_override_names_recipe_and_nearest_key(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^base\.yaml: training\.version = 3: no such key; did you mean versions\?"):
        load_config("base.yaml", ["training.version=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2, column 1: key a is given twice"),
        ("a: 2026-99-99", "month must be in 1..12"),
        ("a: [1", "line 1"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_bad_yaml_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, origin="x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 1e-3), ("-2E4", -2e4), (".5e1", 5.0), ("1.5", 1.5), ("3", 3), ("1e", "1e"), ("e3", "e3")],
)
def test_numbers_are_numbers(text: str, number: object) -> None:
    parsed = parse(text, origin="")
    assert parsed == number
    assert type(parsed) is type(number)


def test_a_recipe_that_is_no_mapping_or_not_there(folder: Path) -> None:
    (folder / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"sections \(key: value lines\), this is a list"):
        load_config("list.yaml")
    with pytest.raises(ConfigError, match="did you mean cartpole"):
        load_config("cartpol")
    with pytest.raises(ConfigError, match="does not exist"):
        load_config("nowhere/base.yaml")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("basse.yaml", "does not exist; did you mean base.yaml? the YAML files of this folder are base.yaml; named"),
        ("bas", "'bas' does not exist; did you mean base.yaml? the YAML files of this folder are base.yaml; named"),
        (
            "inner/bease.yaml",
            "did you mean inner/base.yaml? the YAML files of inner are inner/base.yaml, inner/x.yml; ",
        ),
        ("nofile.yaml", "'nofile.yaml' does not exist; the YAML files of this folder are base.yaml; named recipes are"),
        ("cartpol.yaml", "did you mean cartpole? the YAML files of this folder are base.yaml; named"),
        ("nowhere/base.yaml", "'nowhere/base.yaml' does not exist; named recipes are"),
    ],
)
def test_a_missing_file_is_answered_with_those_there(folder: Path, name: str, said: str) -> None:
    (folder / "inner").mkdir()
    for file in ("base.yaml", "x.yml", "notes.txt"):
        (folder / "inner" / file).write_text("")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(name)


def test_a_name_is_never_shadowed_by_a_folder(folder: Path) -> None:
    (folder / "cartpole").mkdir()
    assert find_recipe("cartpole").parent.name == "recipes"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_survives_saving(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config.seed == 0, "any other seed that is given changes the run"
    text = find_recipe(name).read_text()
    assert len(text.splitlines()) < 60


def test_the_two_recipes_of_the_readme_are_there() -> None:
    assert {"cartpole", "quickstart"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my recipe (2).yaml", "my-recipe-2"),
        ("rézept.yaml", "rézept"),
        ("机器人.yaml", "机器人"),
        ("_draft.yaml", "_draft"),
        ("a.b.yaml", "a.b"),
        ("a--b.yaml", "a--b"),
        ("m²½.yaml", "m21-2"),
        ("re\u0301zept.yaml", "r\u00e9zept"),
        ("-x-.yaml", "x"),
        ("@@.yaml", "recipe"),
        (".hidden.yaml", "hidden"),
        ("a\tb\n.yaml", "a-b"),
    ],
)
def test_a_recipe_may_have_any_file_name(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(find_recipe("cartpole").read_text())
    assert load_config(tmp_path / file).name == name


def test_a_file_is_found_whatever_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = find_recipe("cartpole").read_text()
    for name in ("noext", "B.YAML", "reach"):
        (tmp_path / name).write_text(text)
    assert load_config("noext").name == "noext"
    assert load_config("B.YAML").name == "B"
    assert find_recipe("reach").parent.name == "recipes", "a bare name is a shipped recipe first"


def test_a_section_that_is_missing_is_shown_by_an_example() -> None:
    with pytest.raises(ConfigError, match=r"add it, such as training: \{versions: 20, mini_batch_samples: 16\}"):
        load_config({"env": "gymnasium:CartPole-v1", "policy": "categorical"})


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", "x\n", ".."])
def test_a_name_is_one_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name = .*: it must match"):
        load_config("cartpole", [{"name": name}])


def test_cartpole_is_synchronous_by_settings_alone() -> None:
    synchronous = ["freshness.max_lag=0", "freshness.on_update=drain", "batching.type=lockstep"]
    assert load_config("cartpole", synchronous).batching.type == "lockstep"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("versions=3", r"versions = 3: no such key; did you mean training\.versions\?"),
        ("max_lag=2", r"max_lag = 2: no such key; did you mean freshness\.max_lag\?"),
        (
            "algorithm.loss={type: tis, clip_low: 0.1}",
            r"clip_low = 0\.1: no such key; .* are type, cap, floor, ratio_to; clip_low is one of algorithm\.loss",
        ),
        ("lr=1", r"lr = 1: no such key; did you mean training\.optimizer\.lr or supervised\.lr\?"),
        (
            "training.rows=2",
            r"training\.rows = 2: no such key; did you mean rollout\.rows or evaluation\.rows or join\.rows\?",
        ),
    ],
)
def test_a_key_of_another_section_is_found_there(folder: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config("base.yaml", [override])


def test_a_module_that_is_no_python_and_a_folder_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_env.py").write_text("def spec(:\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(
        ConfigError, match=r"broken_env cannot be imported \(invalid syntax, line 1\); correct that line"
    ):
        load_config("base.yaml", ["env=broken_env:Foo"])
    (folder / "run").mkdir()
    with pytest.raises(ConfigError, match=r"recipe '.*run' is a folder; give a path to a YAML file$"):
        load_config(str(folder / "run"))
    (folder / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"is its config.yaml; to resume that run: polyrhythm resume .*run$"):
        load_config(str(folder / "run"))


def test_a_section_that_would_take_an_earlier_key_away_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss=ppo comes after algorithm.loss.clip_low=0.1, .*first"):
        load_config("cartpole", ["algorithm.loss.clip_low=0.1", "algorithm.loss=ppo"])
    after = load_config("cartpole", ["algorithm.loss=ppo", "algorithm.loss.clip_low=0.1"])
    assert after.algorithm.loss.clip_low == 0.1
    both = load_config("cartpole", ["algorithm.loss.clip_low=0.1", "algorithm.loss={clip_high: 0.3}"])
    assert (both.algorithm.loss.clip_low, both.algorithm.loss.clip_high) == (0.1, 0.3)


@pytest.mark.parametrize("change", ["placement: null", "placement: {preset: null}"])
def test_a_recipe_and_the_command_line_take_a_placement_back(folder: Path, change: str) -> None:
    (folder / "on_gpu.yaml").write_text("extends: cartpole\nplacement: colocated\n")
    (folder / "on_cpu.yaml").write_text(f"extends: on_gpu\n{change}\n")
    assert load_config(folder / "on_gpu.yaml").placement.preset == "colocated"
    assert load_config(folder / "on_cpu.yaml").placement.preset is None
    for override in ("placement=null", "placement.preset=null"):
        assert load_config(folder / "on_gpu.yaml", [override]).placement.preset is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["algorithm.loss={type:", "tis,", "cap:", "5.0}", "seed=3"],
            r"quote it in the shell, as 'algorithm\.loss={type: tis, cap: 5\.0}'$",
        ),
        (["env.files=[a.jsonl,", "b.jsonl]"], r"quote it in the shell, as 'env\.files=\[a\.jsonl, b\.jsonl\]'$"),
        (["env.template='a", "b'"], r"quote it in the shell, as 'env\.template="),
        (["algorithm.loss={type:", "seed=3"], r"quote it in the shell, as 'algorithm\.loss={key: value}'$"),
        (["policy={type:causal_lm,checkpoint:tiny}"], r"type:causal_lm has no value; put a space after each ':'"),
        (["env={type:prompts}"], r"type:prompts has no value; put a space after each ':'"),
        (['env.verify={type:regex,pattern:"([0-9"}'], r"expected ',' or '}', but got '\['; put a space after each ':'"),
    ],
)
def test_an_override_that_is_no_yaml_says_what_it_lacks(folder: Path, words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config("base.yaml", words)


def test_a_recipe_without_the_space_after_a_colon_is_told_so(folder: Path) -> None:
    (folder / "tight.yaml").write_text("policy: {type:gaussian}\n")
    with pytest.raises(ConfigError, match=r"tight\.yaml: line 1, column 10: type:gaussian has no value; put a space"):
        load_config("tight.yaml")
    assert parse_override("env.kwargs={'a:b': null, c:d: null, e: }") == {
        "env": {"kwargs": {"a:b": None, "c:d": None, "e": None}}
    }


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("env.chat=yes", r"^base\.yaml: env\.chat = true: it must be 'auto' or 'none'$"),
        ("env.chat=atuo", r"^base\.yaml: env\.chat = 'atuo': did you mean auto\?"),
        ("env.chat={sistem: Answer}", r"^base\.yaml: env\.chat\.sistem = 'Answer': no such key; did you mean system\?"),
        ("policy={type: pi0, size: big}", r"policy\.size = 'big': it must be 'released'"),
    ],
)
def test_a_word_or_a_section_is_explained_as_what_was_given(folder: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        load_config("base.yaml", ["env={type: chains}", override])
    assert len(raised.value.problems) == 1
