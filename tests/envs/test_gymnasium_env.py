"""Spaces, infos and errors of the Gymnasium adapter; the contract itself is in test_contract."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from tests.pipeline.runs import config

from polyrhythm.config.load import validate
from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import RowsFailed, batch_traits
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.envs.mujoco import BACKENDS, is_loadable
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.evaluation.standalone import with_variants
from polyrhythm.specs import ArraySpec


class Recorder(gymnasium.Env[Any, Any]):
    """Echoes: remembers the actions it got; ends with success at the third step."""

    def __init__(
        self,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        infos: tuple[dict[str, Any], ...] = ({}, {}, {}),
    ) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or Box(0, 1, (2,), np.float64)
        self.got: list[Any] = []
        self.infos = infos

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.got.append(action)
        done = len(self.got) == 3
        info = {"is_success": done, **self.infos[len(self.got) - 1]}
        return self.observation_space.sample(), 1.0, done, False, info


@pytest.fixture(autouse=True, scope="module")
def recorder():
    gymnasium.register(ID, Recorder)
    gymnasium.register(SHORT, Recorder, max_episode_steps=2)
    gymnasium.register(LONG, Recorder, max_episode_steps=3)
    yield
    for name in (ID, SHORT, LONG):
        gymnasium.registry.pop(name)


ID, SHORT, LONG = "polyrhythm-test/Recorder-v0", "polyrhythm-test/Short-v0", "polyrhythm-test/Long-v0"
TWO = Dict({"a": Box(0, 1, (3,), np.float64), "b": Box(0, 1, (3,), np.float64)})


class Doubled(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observations times two."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = Box(0, 2, (2,), np.float64)

    def observation(self, observation: Any) -> Any:
        return 2 * observation


def plus(env: gymnasium.Env[Any, Any], by: float = 1.0) -> gymnasium.Env[Any, Any]:
    space = Box(0, 9, (2,), np.float64)
    return gymnasium.wrappers.TransformObservation(env, lambda observation: observation + by, space)


def breaking(env: object) -> None:
    raise RuntimeError("no display")


def careless(env: gymnasium.Env[Any, Any]) -> None:
    """It returns nothing."""


def settings(
    max_steps: int = 10, rename: Any = None, metrics: Any = (), drop: Any = (), **kwargs: Any
) -> GymnasiumSettings:
    names = {"rename": rename or {}, "drop": drop}
    return GymnasiumSettings(id=ID, max_steps=max_steps, kwargs=kwargs, metrics=metrics, **names)


def wrapping(*wrappers: Any) -> GymnasiumSettings:
    return GymnasiumSettings(id=ID, max_steps=10, kwargs={"action_space": Discrete(2)}, wrappers=wrappers)


def tasks(*kwargs: dict[str, Any]) -> GymnasiumSettings:
    listed = tuple({"id": ID, "name": f"task {place}", "kwargs": own} for place, own in enumerate(kwargs))
    return GymnasiumSettings(max_steps=10, tasks=listed)


def seen(batch: Any, rows: int = 1) -> dict[str, Any]:
    out = {key: np.zeros((rows, *spec.shape), spec.dtype) for key, spec in batch.spec.observation.items()}
    batch.observe(range(rows), out)
    return out


def received(batch: Any) -> Any:
    return batch.envs[0].unwrapped.got[-1]


def test_discrete_actions_start_where_the_space_starts():
    batch = settings(action_space=Discrete(3, start=5)).build(1)
    assert (batch.spec.action.kind, batch.spec.action.dim, batch.spec.action.choices) == ("discrete", 1, 3)
    batch.reset([0], [0], [0])
    batch.step([0], np.array([[2]]))
    assert received(batch) == 7
    assert type(received(batch)) is int


def test_box_actions_are_flattened_and_restored():
    batch = settings(
        action_space=Box(np.array([[-1, -2], [-3, -4]]), np.array([[1, 2], [3, 4]]), dtype=np.float64)
    ).build(1)
    assert batch.spec.action.low == (-1, -2, -3, -4)
    batch.reset([0], [0], [0])
    batch.step([0], np.array([[1, 2, 3, 4]], np.float32))
    assert received(batch).tolist() == [[1, 2], [3, 4]]
    assert received(batch).dtype == np.float64


@pytest.mark.parametrize(
    ("space", "counts", "action", "got"),
    [
        (MultiDiscrete([4, 4]), (4, 4), [3, 0], [3, 0]),
        (MultiDiscrete([10, 5, 2]), (10, 5, 2), [9, 4, 1], [9, 4, 1]),
        (MultiDiscrete([[3, 2], [1, 4]]), (3, 2, 1, 4), [2, 1, 0, 3], [[2, 1], [0, 3]]),
        (MultiDiscrete([3, 2], start=[5, -1]), (3, 2), [2, 1], [7, 0]),
        (MultiBinary(3), (2, 2, 2), [1, 0, 1], [1, 0, 1]),
    ],
)
def test_each_entry_of_an_action_has_its_own_choices(space, counts, action, got):
    batch = settings(action_space=space).build(1)
    assert (batch.spec.action.counts, batch.spec.action.choices) == (counts, max(counts))
    batch.reset([0], [0], [0])
    batch.step([0], np.array([action]))
    assert received(batch).tolist() == got
    assert space.contains(received(batch))


@pytest.mark.parametrize(
    ("wrapper", "kwargs"),
    [
        ("MaxAndSkipObservation", {"skip": 2}),
        ("FrameStackObservation", {"stack_size": 3}),
        ("TimeAwareObservation", {"normalize_time": False}),
        ("TimeAwareObservation", {"flatten": True}),
        ("StickyAction", {"repeat_action_probability": 0.5}),
    ],
)
@pytest.mark.parametrize("max_steps", [0, 7])
def test_wrappers_see_the_time_limit_as_with_bare_gymnasium(wrapper, kwargs, max_steps):
    """Observations, rewards, length and kind of end; seeds below 2^30 are those of gymnasium."""
    added = {"apply": f"gymnasium.wrappers:{wrapper}", "kwargs": kwargs}
    batch = GymnasiumSettings(id="Pendulum-v1", max_steps=max_steps, wrappers=(added,)).build(1)
    bare = getattr(gymnasium.wrappers, wrapper)(
        gymnasium.make("Pendulum-v1", max_episode_steps=max_steps or None), **kwargs
    )
    batch.reset([0], [0], [5])
    wanted, _ = bare.reset(seed=5)
    steps, over = 0, False
    while not over:
        for name, array in seen(batch).items():
            np.testing.assert_array_equal(array[0], wanted if name == "state" else wanted[name])
        action = np.array([0.1 * steps - 1], np.float32)
        wanted, reward, terminated, truncated, _ = bare.step(action)
        result = batch.step([0], action[None])
        assert (result.reward[0], bool(result.terminated[0])) == (np.float32(reward), terminated)
        assert bool(result.truncated[0]) == truncated
        steps, over = steps + 1, terminated or truncated
    assert steps == -(-(max_steps or 200) // kwargs.get("skip", 1))


def hiding(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """It never says that an episode is over."""

    class Hiding(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            observation, reward, _, _, info = self.env.step(action)
            return observation, reward, False, False, info

    return Hiding(env)


def test_a_time_limit_that_a_wrapper_hides_still_truncates():
    batch = GymnasiumSettings(id="Pendulum-v1", max_steps=3, wrappers=(f"{__name__}:hiding",)).build(1)
    batch.reset([0], [0], [5])
    cut = [bool(batch.step([0], np.zeros((1, 1), np.float32)).truncated[0]) for _ in range(3)]
    assert cut == [False, False, True]


def test_dict_observations_get_dotted_keys():
    space = Dict({"hand": Dict({"pos": Box(0, 1, (3,), np.float64)}), "image": Box(0, 255, (4, 4, 3), np.uint8)})
    batch = settings(action_space=Discrete(2), observation_space=space).build(2)
    assert batch.spec.observation == {
        "hand.pos": ArraySpec((3,), "float32"),
        "image": ArraySpec((4, 4, 3), "uint8"),
    }
    batch.reset([0, 1], [0, 0], [1, 2])
    out = {key: np.zeros((2, *spec.shape), spec.dtype) for key, spec in batch.spec.observation.items()}
    batch.observe([0, 1], out)
    assert all(part[0].any() and not np.array_equal(part[0], part[1]) for part in out.values())


def test_success_comes_from_the_info():
    batch = settings(action_space=Discrete(2)).build(1)
    batch.reset([0], [0], [0])
    results = [batch.step([0], np.array([[0]])) for _ in range(3)]
    assert [bool(r.success[0]) for r in results] == [False, False, True]
    assert [bool(r.terminated[0]) for r in results] == [False, False, True]


def test_observations_are_renamed_nested_ones_too():
    space = Dict({"hand": Dict({"pos": Box(0, 1, (3,), np.float64)}), "image": Box(0, 255, (4, 4, 3), np.uint8)})
    renamed = settings(action_space=Discrete(2), observation_space=space, rename={"hand.pos": "proprio"}).build(1)
    plain = settings(action_space=Discrete(2), observation_space=space).build(1)
    assert [*renamed.spec.observation] == ["proprio", "image"]
    for batch in (renamed, plain):
        batch.reset([0], [0], [7])
    assert np.array_equal(seen(renamed)["proprio"], seen(plain)["hand.pos"])


def test_one_array_is_renamed_from_state():
    batch = settings(action_space=Discrete(2), rename={"state": "pole"}).build(1)
    batch.reset([0], [0], [7])
    assert seen(batch)["pole"].any()


def test_wrappers_are_applied_in_order():
    doubled = f"{__name__}:Doubled"
    plain, first, last = (
        wrapping(*wrappers).build(1)
        for wrappers in (
            (),
            (doubled, f"{__name__}:plus"),
            ({"apply": f"{__name__}:plus", "kwargs": {"by": 3}}, doubled),
        )
    )
    for batch in (plain, first, last):
        batch.reset([0], [0], [7])
    state = seen(plain)["state"]
    np.testing.assert_allclose(seen(first)["state"], 2 * state + 1, rtol=1e-6)
    np.testing.assert_allclose(seen(last)["state"], 2 * (state + 3), rtol=1e-6)


def test_several_tasks_have_instructions_and_a_row_is_reset_to_any_of_them():
    heavy = {"id": "Pendulum-v1", "instruction": "swing it up where gravity is strong", "kwargs": {"g": 30.0}}
    batch = GymnasiumSettings(tasks=({"id": "Pendulum-v1", "name": "usual"}, heavy), kwargs={"g": 10.0}).build(2)
    assert [task.name for task in batch.spec.tasks] == ["usual", "swing it up where gravity is strong"]
    assert [task.instruction for task in batch.spec.tasks] == ["Pendulum-v1", "swing it up where gravity is strong"]
    ended = {}
    for task in (0, 1, 0):
        batch.reset([1], [task], [3])
        batch.step([1], np.array([[0.5]], np.float32))
        ended.setdefault(task, []).append(seen(batch, 2)["state"][1])
    assert np.array_equal(*ended[0])
    assert not np.array_equal(ended[0][0], ended[1][0])
    assert [env.unwrapped.g for _, env in sorted(batch.made.items())] == [10.0, 30.0, 10.0, 30.0]
    batch.close()


def test_tasks_keep_their_own_time_limits():
    listed = ({"id": SHORT}, {"id": LONG})
    batch = GymnasiumSettings(tasks=listed, kwargs={"action_space": Discrete(2)}).build(2)
    assert batch.spec.max_steps == 3
    batch.reset([0, 1], [0, 1], [0, 0])
    cut = [batch.step([0, 1], np.array([[0], [0]])).truncated.tolist() for _ in range(2)]
    assert cut == [[False, False], [True, False]]


def test_metrics_come_from_the_info_of_each_step():
    infos = ({"force": 2.0, "part": {"x": np.float32(0.5)}}, {"force": np.array([4])}, {"slip": True, "force": None})
    chosen = {"force": "sum", "slip": "last", "part.x": "mean"}
    batch = settings(action_space=Discrete(2), infos=infos, metrics=chosen).build(1)
    assert batch.spec.metrics == chosen
    batch.reset([0], [0], [0])
    found = [batch.step([0], np.array([[0]])).metrics for _ in range(3)]
    np.testing.assert_array_equal([m["force"][0] for m in found], [2, 4, np.nan])
    np.testing.assert_array_equal([m["slip"][0] for m in found], [np.nan, np.nan, 1])
    np.testing.assert_array_equal([m["part.x"][0] for m in found], [0.5, np.nan, np.nan])


def test_a_list_of_metrics_takes_the_last_of_each():
    assert settings(action_space=Discrete(2), metrics=["force"]).metrics == {"force": "last"}


def test_what_is_no_number_is_no_metric():
    batch = settings(action_space=Discrete(2), infos=({"force": "much"},), metrics=["force"]).build(1)
    batch.reset([0], [0], [0])
    with pytest.raises(
        ConfigError, match=r"env\.metrics\.force: the environment's info has 'much' there, neither a bool nor one"
    ):
        batch.step([0], np.array([[0]]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "set either id or tasks"),
        ({"id": "CartPole-v1", "tasks": [{"id": "CartPole-v1"}]}, "set either id or tasks"),
        ({"id": "CartPole-v1", "metrics": ["a/b"]}, "env.metrics = [a/b]: a metric's name is of letters"),
        ({"id": "CartPole-v1", "metrics": {"x": "median"}}, "env.metrics.x = 'median': did you mean mean? it must"),
        ({"id": "CartPole-v1", "wrapper": ["m:f"]}, "did you mean wrappers?"),
        ({"tasks": [{"id": "CartPole-v1", "instructions": "x"}]}, "env.tasks.0.instructions = 'x': no such key"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(given, said):
    tree = {"policy": {"type": "gaussian"}, "training": {"versions": 1, "mini_batch_samples": 1}, "name": "x"}
    with pytest.raises(ConfigError) as caught:
        validate({**tree, "env": {"type": "gymnasium", **given}})
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["gymnasium", "gymnasium_vector"])
def test_observations_that_are_dropped_are_not_there(kind):
    spaces = Dict({"mission": Text(3), "arm": Dict({"x": Box(0, 1, (2,), np.float64), "note": Text(3)})})
    kwargs = {"action_space": Discrete(2), "observation_space": spaces}
    names = {"drop": ["mission", "arm.note"], "rename": {"arm.x": "proprio"}}
    made = resolve("env", {"type": kind, "id": ID, "max_steps": 9, "kwargs": kwargs, **names})
    batch = made.build(2)
    batch.reset([0, 1], [0, 0], [1, 2])
    assert batch.spec.observation == {"proprio": ArraySpec((2,), "float32")}
    out = {"proprio": np.full((2, 2), -1.0, np.float32)}
    batch.observe([0, 1], out)
    assert (out["proprio"] >= 0).all()
    batch.close()


@pytest.fixture
def sims(tmp_path, monkeypatch):
    """A module that registers my_sims/Thing-v0 once it is imported."""
    text = "import gymnasium\ngymnasium.register('my_sims/Thing-v0', 'my_sims:Thing', max_episode_steps=5)\n"
    (tmp_path / "my_sims.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    gymnasium.registry.pop("my_sims/Thing-v0", None)
    sys.modules.pop("my_sims", None)


@pytest.mark.parametrize(
    ("env_id", "remedy"),
    [
        ("my_sims/Thing-v0", "; write my_sims:my_sims/Thing-v0, so that my_sims is imported, which registers it"),
        ("my-sims/Thing-v0", "; write my_sims:my-sims/Thing-v0, so that my_sims is imported, which registers it"),
        ("my_sims:Thing-v0", "; the nearest is my_sims/Thing-v0"),
        ("my_sims:Xylophone-v0", "; my_sims registers no similar one"),
        ("my_sim/Thing-v0", "-m pip install my-sim, and write my_sim:my_sim/Thing-v0"),
        ("ALE/Pong-v5", "-m pip install ale-py, and write ale_py:ALE/Pong-v5"),
        ("PandaReach-v3", "-m pip install panda-gym, and write panda_gym:PandaReach-v3"),
        ("CartPol-v1", "; the nearest is CartPole-v1 (or write module:ID with the module that registers it)"),
        ("Xylophone-v0", "unknown to the run's processes, unless launcher=inline)"),
    ],
)
def test_an_unknown_id_names_its_module_or_the_nearest(env_id, remedy, sims):
    with pytest.raises(ConfigError) as caught:
        GymnasiumSettings(id=env_id).spec()
    assert str(caught.value).startswith(f"env.id = {env_id}: no such Gymnasium environment (")
    assert str(caught.value).endswith(remedy)


def test_the_gl_backend_is_chosen_for_any_environment_that_may_be_mujocos(monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("MUJOCO_GL")
    able = [backend for backend in BACKENDS if is_loadable(backend)]
    GymnasiumSettings(id="CartPole-v1").spec()
    assert "MUJOCO_GL" not in os.environ, "mujoco has been imported: it would be ignored"
    monkeypatch.delitem(sys.modules, "mujoco")
    GymnasiumSettings(id="CartPole-v1").spec()
    assert os.environ.get("MUJOCO_GL") in (able or [None])
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    GymnasiumSettings(id="CartPole-v1").spec()
    assert os.environ["MUJOCO_GL"] == "glfw", "the user's choice stays"


def test_the_registered_limit_is_the_default():
    assert GymnasiumSettings(id="CartPole-v1").spec().max_steps == 500


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GymnasiumSettings(id="CartPol-v1"), "the nearest is CartPole-v1"),
        (GymnasiumSettings(id="CartPole-v99"), "the nearest is CartPole-v1"),
        (GymnasiumSettings(id="no_such_module:CartPole-v1"), "No module named 'no_such_module'"),
        (GymnasiumSettings(id="CartPole-v1", kwargs={"colour": "red"}), "cannot be made with kwargs {'colour': 'red'}"),
        (settings(0, action_space=Discrete(2)), "registers no time limit; set max_steps above 0"),
        (settings(action_space=Text(3)), "wrap them into a float Box"),
        (settings(action_space=Box(0, 5, (2,), np.int32)), "wrap them into a float Box"),
        (settings(action_space=Tuple((Discrete(2), Discrete(3)))), "wrap them into a float Box"),
        (
            settings(action_space=Box(np.zeros(2, np.float32), np.array([1, 0], np.float32))),
            "with an entry that cannot change; wrap it away",
        ),
        (settings(action_space=Discrete(1)), "actions are Discrete(1), with nothing to choose; wrap"),
        (
            settings(action_space=Discrete(2), rename={"states": "x"}),
            "env.rename.states = x: no such observation, there are state",
        ),
        (settings(action_space=Discrete(2), rename={"state": ""}), "two observations would be ''"),
        (settings(action_space=Discrete(2), observation_space=TWO, rename={"a": "b"}), "two observations would be 'b'"),
        (
            wrapping("no_such_module:Thing"),
            "env.wrappers.0 = no_such_module:Thing: cannot be imported",
        ),
        (wrapping(f"{__name__}:nothing"), "has no attribute 'nothing'"),
        (wrapping(f"{__name__}:Doubled", f"{__name__}:careless"), "careless: it returned NoneType; return an env"),
        (wrapping({"apply": f"{__name__}:Doubled", "kwargs": {"by": 3}}), "raised TypeError: "),
        (wrapping(f"{__name__}:breaking"), "breaking: it raised RuntimeError: no display (" + __file__ + ", line "),
        (tasks({"action_space": Discrete(2)}, {"action_space": Discrete(3)}), "its actions are Discrete(3), those of"),
        (
            tasks({"action_space": Discrete(2)}, {"action_space": Discrete(2), "observation_space": TWO}),
            "env.tasks.1.id = polyrhythm-test/Recorder-v0: its observations are",
        ),
        (
            GymnasiumSettings(tasks=({"id": "CartPole-v1"}, {"id": "CartPole-v1"})),
            "env.tasks.1.name = CartPole-v1: another task has this name; make names unique",
        ),
        (
            GymnasiumSettings(tasks=({"id": "CartPole-v1"}, {"id": "CartPol-v1"})),
            "env.tasks.1.id = CartPol-v1: no such",
        ),
        (settings(action_space=Discrete(2), observation_space=Text(3)), "observation state is Text"),
        (
            settings(action_space=Discrete(2), observation_space=Dict({"a": Box(0, 1), "mission": Text(3)})),
            "Dict or Tuple space of these, or leave it out by env.drop=[mission]",
        ),
        (
            settings(action_space=Discrete(2), observation_space=TWO, drop=["c"]),
            "env.drop = c: no such observation, there are a, b; name one of them",
        ),
        (
            settings(action_space=Discrete(2), observation_space=TWO, drop=["a", "b"]),
            "env.drop = ['a', 'b']: no observation is left",
        ),
    ],
)
def test_errors_say_what_value_and_remedy(made, said):
    with pytest.raises(ConfigError) as caught:
        made.spec()
    assert said in str(caught.value)


@pytest.mark.parametrize("python", ["", sys.executable], ids=["here", "separate"])
def test_a_row_that_is_discarded_is_made_anew_at_its_next_reset(python: str) -> None:
    section = {"type": "gymnasium", "id": "tests.envs.vector_envs:Ageing-v0", **({"python": python} if python else {})}
    batch = resolve("env", section).build(2)

    def age(row: int) -> float:
        batch.reset([row], [0], [1])
        out = {"state": np.zeros((1, 1), np.float32)}
        batch.observe([row], out)
        return float(out["state"][0, 0])

    try:
        assert batch_traits(batch).discards_rows
        assert [age(0), age(0), age(1)] == [1, 2, 1]
        batch.discard(0)
        batch.discard(0)
        assert [age(0), age(1)] == [1, 2]
    finally:
        batch.close()


@pytest.mark.sim
@pytest.mark.usefixtures("simulator")  # which chooses the GL backend before MuJoCo is imported
def test_a_state_that_mujoco_finds_unstable_fails_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    batch = GymnasiumSettings(id="HalfCheetah-v5").build(2)
    try:
        batch.reset([0, 1], [0, 0], [1, 2])
        broken = batch.envs[0]
        broken.unwrapped.data.qvel[:] = 1e12
        with pytest.raises(
            RowsFailed, match=r"^row 0: UnstableSimulationError: MuJoCo found the state unstable at"
        ) as f:
            batch.step([0, 1], np.zeros((2, 6), np.float32))
        assert np.isfinite(f.value.result.reward[1])
        batch.reset([0], [0], [3])
        assert batch.envs[0] is not broken
        batch.step([0, 1], np.zeros((2, 6), np.float32))
    finally:
        batch.close()


@pytest.mark.parametrize("python", ["", sys.executable], ids=["here", "separate"])
def test_a_row_that_raises_fails_alone_and_is_made_anew_at_its_next_reset(python: str) -> None:
    section = {"type": "gymnasium", "id": "tests.envs.vector_envs:Fragile-v0", **({"python": python} if python else {})}
    batch = resolve("env", section).build(3)
    try:
        batch.reset([0, 1, 2], [0] * 3, [1, 2, 3])
        with pytest.raises(RowsFailed, match=r"row 1: RuntimeError: .*the solver diverged") as failed:
            batch.step([0, 1, 2], np.array([[0], [2], [1]]))
        assert list(failed.value.errors) == [1]
        assert failed.value.result.reward[0] > 0
        with pytest.raises(RowsFailed, match=r"row 1: .*ValueError: no such state"):
            batch.reset([1], [0], [13])
        batch.reset([1], [0], [2])
        assert batch.step([0, 1, 2], np.array([[0], [0], [0]])).reward.shape == (3,)
    finally:
        batch.close()


def upwards(env: Any) -> Any:
    """An expert: the largest action of the space."""
    space = env.action_space
    if isinstance(space, Discrete):
        return space.start + space.n - 1
    return space.high if isinstance(space, Box) else space.nvec + space.start - 1


def failing(env: Any) -> Any:
    raise ArithmeticError("no way")


def too_long(env: Any) -> Any:
    return [0.0] * 5


def of_expert(name: str, space: gymnasium.Space[Any]) -> GymnasiumSettings:
    return GymnasiumSettings(id=ID, max_steps=10, kwargs={"action_space": space}, expert=name)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (Box(-2, 3, (2,), np.float64), [3, 3]),
        (Box(-1, 1, (2, 2)), [1, 1, 1, 1]),
        (Discrete(3, start=5), [2]),
        (MultiDiscrete([2, 4], start=[0, 7]), [1, 3]),
    ],
)
def test_an_experts_actions_are_those_that_step_takes(space: gymnasium.Space[Any], expected: list[float]) -> None:
    batch = of_expert(f"{__name__}:upwards", space).build(2)
    assert batch_traits(batch).expert
    batch.reset([1], [0], [3])
    actions = batch.expert_actions([1])
    assert actions.tolist() == [expected]
    batch.step([1], actions)
    (taken,) = batch.envs[1].unwrapped.got
    assert np.array_equal(taken, upwards(batch.envs[1]))


@pytest.mark.parametrize(
    ("expert", "why"),
    [
        ("nowhere:expert", "env.expert = nowhere:expert: cannot be imported"),
        (f"{__name__}:nobody", "cannot be imported"),
        (f"{__name__}:failing", "it raised ArithmeticError: no way"),
        (f"{__name__}:too_long", "it returned 5 numbers; return an action of"),
    ],
)
def test_an_expert_that_cannot_act_is_refused_by_its_setting(expert: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^env\.expert = ") as refused:
        of_expert(expert, Discrete(2)).build(1).expert_actions([0])
    assert why in str(refused.value)


def test_without_an_expert_there_are_no_demonstrations() -> None:
    assert not batch_traits(GymnasiumSettings(id="CartPole-v1").build(1)).expert


def test_altered_keyword_arguments_are_variants() -> None:
    altered = {"hidden": {"what": "no goal", "kwargs": {"goal": "hidden"}}}
    settings = GymnasiumSettings.model_validate({"id": ID, "kwargs": {"goal": "shown", "size": 3}, "altered": altered})
    (found,) = settings.variants().values()
    assert (found.kind, found.what) == ("vision", "no goal")
    assert found.settings == {"kwargs": {"goal": "hidden"}}
    assert not GymnasiumSettings(id=ID).variants()


@pytest.mark.parametrize(
    ("common", "own", "altered", "expected"),
    [
        ({"goal": "shown"}, {}, {"goal": "hidden"}, {"goal": "hidden"}),
        ({}, {"goal": "shown"}, {"goal": "hidden"}, {"goal": "hidden"}),
        ({"goal": "shown", "size": 3}, {"goal": "far", "size": 4}, {"goal": "hidden"}, {"goal": "hidden", "size": 4}),
        ({}, {"light": {"angle": 1, "power": 2}}, {"light": {"power": 0}}, {"light": {"angle": 1, "power": 0}}),
        ({}, {"goal": "shown"}, {"goal": None}, {"goal": None}),
        ({}, {"size": 3}, {"goal": "hidden"}, {"size": 3, "goal": "hidden"}),
    ],
)
def test_a_variant_also_changes_what_a_task_sets_for_itself(
    common: dict[str, Any], own: dict[str, Any], altered: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Also where one task of two sets the keyword, and the other has it from all."""
    tasks = [{"id": ID, "name": "one", "instruction": "go", "kwargs": own}, {"id": ID, "name": "two"}]
    variants = {"other": {"what": "another", "kwargs": altered}}
    env = {"type": "gymnasium", "kwargs": common, "tasks": tasks, "altered": variants}
    ((_, found),) = with_variants(config(env=env | {"id": ""}), ["all"]).values()
    assert isinstance(found.env, GymnasiumSettings)
    first, second = ({**found.env.kwargs, **task.kwargs} for task in found.env.task_list)
    assert first == expected
    assert second == {**common, **altered}
    assert [(task.name, task.instruction) for task in found.env.task_list] == [("one", "go"), ("two", "")]
