"""A cluster on paper: what is wrong in it is said, and checks and plans take it in place of one that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.process.runs import ASYNCHRONOUS

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.cluster.description import describe, read_description
from polyrhythm.runtime.devices import Devices, NodeMemory

A = {"name": "a", "cpus": 16, "gpus": 8}


def written(folder: Path, nodes: Any, name: str = "cluster.yaml") -> str:
    (file := folder / name).write_text(yaml.safe_dump({"nodes": nodes}))
    return str(file)


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "nodes = []: a cluster has one node at least; list its nodes"),
        ([A, {**A, "name": "b", "gpu": 8}], "nodes.1.gpu = 8: no such key; did you mean gpus?"),
        ([{**A, "gpus": -1}], "nodes.0.gpus = -1: it must be at least 0"),
        ([{**A, "cpus": -0.5}], "nodes.0.cpus = -0.5: it must be at least 0"),
        ([{**A, "gpus": 1.5}], "nodes.0.gpus = 1.5: it must be"),
        ([{**A, "memory_gb": 0}], "nodes.0.memory_gb = 0: it must be more than 0"),
        ([{"cpus": 16}], "nodes.0.name is missing; add it"),
        ([A, A], "nodes.1.name = 'a': another node has it; give each its own"),
        ("a", "nodes = 'a': it must be"),
        ([3], "nodes.0 = 3: it must be a section"),
    ],
)
def test_a_wrong_description_is_refused_in_one_sentence(nodes: Any, problem: str, tmp_path: Path) -> None:
    file = written(tmp_path, nodes)
    with pytest.raises(ConfigError) as refused:
        read_description(file)
    (told,) = refused.value.problems
    assert told.startswith(problem)
    assert file in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (listed := tmp_path / "listed.yaml").write_text("- a\n")
    (more := tmp_path / "more.yaml").write_text("nodes: [{name: a, cpus: 1}]\nhead: a\n")
    for file, problem in (
        (tmp_path / "none.yaml", "cannot be read"),
        (listed, "it must have sections"),
        (more, "head = 'a': no such key; "),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_description(str(file))


def test_what_is_written_from_a_cluster_is_read_again(tmp_path: Path) -> None:
    found = [("node 10.0.0.1 (5be1f3a2)", {"CPU": 4.0, "GPU": 2.0, "memory": 8e9, "node:10.0.0.1": 1.0}), ("b", {})]
    (file := tmp_path / "cluster.yaml").write_text(describe(found))
    description = read_description(str(file))
    assert description.cpus() == {"node 10.0.0.1 (5be1f3a2)": 4.0, "b": 0.0}
    sizes = {"node 10.0.0.1 (5be1f3a2)": NodeMemory(8 * 10**9), "b": NodeMemory()}
    nodes = (("node 10.0.0.1 (5be1f3a2)", 2), ("b", 0))
    assert description.devices(0) == Devices(nodes, "cuda", sizes)
    assert description.devices(1) == Devices(((*nodes[0][:1], 1), nodes[1]), "sim", sizes)


def checked(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["train", *words, "--check", "--json"])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, json.loads(captured.out)


PI0 = ["metaworld_pi0", "placement=hybrid"]


@pytest.mark.parametrize("counts", [(8,), (4, 4), (0, 5, 3)])
def test_a_row_on_enough_gpus_lacks_its_files_and_nothing_else(
    counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Ray runs. The simulator's package is missing where it is not installed."""
    monkeypatch.chdir(tmp_path)
    nodes = [{"name": f"n{i}", "cpus": 24, "gpus": count} for i, count in enumerate(counts)]
    status, told = checked(tmp_path, capsys, *PI0, "--cluster", written(tmp_path, nodes))
    rest = {line for line in told["missing"] if "there is no such folder" not in line}
    assert (status, told["failed"]) == (3, [])
    assert all("metaworld" in line for line in rest)
    assert len(told["missing"]) == len(set(told["missing"]))
    assert {"checkpoint", "policy.tokenizer"} == {line.partition(" =")[0] for line in set(told["missing"]) - rest}


def test_too_few_gpus_are_missing_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, [{"name": "n0", "cpus": 64, "gpus": 1}, {"name": "n1", "cpus": 64}])
    _, told = checked(tmp_path, capsys, *PI0, "--cluster", file)
    (found,) = [line for line in told["missing"] if "GPU" in line]
    lacks = "this row takes 8 GPUs (devices=N scales it to N) and the cluster has 1 GPU (1 on n0)"
    assert found == f"placement.preset = hybrid: {lacks}"
    assert "devices = 8" not in " ".join(check["detail"] for check in told["checks"]), "that is said already"
    fixes = " ".join(check["fix"] for check in told["checks"])
    assert "torch" not in fixes
    assert "ray start" not in fixes


def recipe(folder: Path, **changes: Any) -> str:
    (file := folder / "recipe.yaml").write_text(yaml.safe_dump(merge(ASYNCHRONOUS, changes)))
    return str(file)


def test_too_few_cpus_and_too_little_memory_are_said_for_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = recipe(tmp_path, placement={"preset": "disaggregated"}, rollout={"generators": 3, "simulators": 3})
    small = {"cpus": 2, "gpus": 2, "memory_gb": 1, "gpu_memory_gb": 80}
    file = written(tmp_path, [{"name": "a", **small}, {"name": "b", **small, "cpus": 9}])
    status, told = checked(tmp_path, capsys, own, "--cluster", file)
    (lacking,) = told["missing"]
    assert (status, told["failed"]) == (3, [])
    assert lacking == "ray.cpus_per_station = 1: CPUs are wanted for processes on devices: 4 on a, which has 2"
    assert main(["plan", own, "--memory", "--cluster", file, "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert {name: found["free"] for name, found in devices.items()} == {
        "cpu": None, "a": 10**9, "b": 10**9, "cuda:0": 80 * 10**9, "cuda:1": 80 * 10**9, "cuda:2": 80 * 10**9,
        "cuda:3": 80 * 10**9,
    }  # fmt: skip
    assert {"shared", "generator-0", "generator-1"} <= devices["a"]["stations"].keys()
    tight = written(tmp_path, [{"name": "a", **small, "memory_gb": 1e-6}, {"name": "b", **small}], "tight.yaml")
    assert main(["plan", own, "--memory", "--cluster", tight]) == 1
    assert "\na: " in (out := capsys.readouterr().out)
    assert "DOES NOT FIT" in out


def test_a_description_without_memory_is_told_to_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = recipe(tmp_path, placement={"preset": "colocated"})
    memory = {"memory_gb": 64, "gpu_memory_gb": 80}
    nodes = [{"name": "a", "cpus": 16, "gpus": 1, **memory}, {"name": "b", "cpus": 16}]
    for lacking, told in (
        (nodes, "not compared with the memory of b: add memory_gb to these nodes"),
        (
            [{**nodes[0], "gpu_memory_gb": None}, {**nodes[1], **memory}],
            "not compared with the memory of a: add memory",
        ),
        ([nodes[0], {**nodes[1], **memory}], ""),
    ):
        _, found = checked(tmp_path, capsys, own, "--cluster", written(tmp_path, lacking))
        (detail,) = [check["detail"] for check in found["checks"] if check["name"] == "memory by station"]
        assert told in detail
        assert "--cluster FILE" not in detail, "it is one"
        assert ("not compared" in detail) is bool(told)


def test_a_description_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, [A])
    own = recipe(tmp_path, out_dir=str(tmp_path / "runs"))
    assert main(["train", own, "launcher=ray", f"ray.address={file}"]) == 2
    assert f"ray.address = {file}: it describes a cluster, for --check; name the address" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", own, "--cluster", file])
    assert "--cluster is for --check" in capsys.readouterr().err.replace(f" {file}", "")
    assert main(["train", own, "--cluster", "cluster", "--check"]) == 2
    assert "--cluster = cluster: not a file that describes a cluster" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*"))
