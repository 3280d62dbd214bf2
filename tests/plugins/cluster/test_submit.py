"""`train --slurm` and `--kuberay`: bad values, impossible jobs, the files written, and how the queue is called."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.plugins.planning.profiles import RECIPE, profile, recipe

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.plugins.cluster.submit import kuberay, slurm
from polyrhythm.plugins.cluster.submit.command import KEYS
from polyrhythm.plugins.cluster.submit.job import TrainingJob, cpus_of_node, place_job
from polyrhythm.plugins.cluster.submit.options import KubeRaySettings, SlurmSettings, time_s

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/ray/slurm.sh"


def ray_version() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (found,) = {match[1] for line in extras["ray"] if (match := re.search(r"ray.*?==([\d.]+)", line))}
    return found


def test_tests_run_with_the_ray_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = f"ray=={ray_version()}"
    assert pinned in extras["dev"]
    assert pinned in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own, and no queue in PATH but those that it makes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(shutil.which('bash') or '').parent}")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)


def stand_in(name: str, text: str) -> None:
    """A command in PATH that says how it was called."""
    file = Path("bin", name)
    file.write_text(f'#!/bin/bash\necho "{name} $*" >> said\n{text}\n')
    file.chmod(0o755)


def said() -> list[str]:
    return Path("said").read_text().splitlines() if Path("said").exists() else []


def submitted(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["train", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def directives(script: str) -> dict[str, str]:
    """The options of a script as sbatch reads them: up to the first command."""
    found = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if match := re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.*))?", line):
            found[match[1]] = " ".join(shlex.split(match[2] or ""))
    return found


def test_the_help_has_the_keys_of_the_settings() -> None:
    assert {option: set(keys) for option, keys in KEYS.items()} == {
        "slurm": set(SlurmSettings.model_fields),
        "kuberay": set(KubeRaySettings.model_fields),
    }


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("slurm", "", "'' is not key=value; the keys are nodes"),
        ("slurm", "nodes", "'nodes' is not key=value"),
        ("slurm", "nodes=", "'nodes=' is not key=value"),
        ("slurm", "nodes=2,nodes=3", "nodes is there twice"),
        ("slurm", "nods=2", "slurm.nods = '2': no such key; did you mean nodes?"),
        ("slurm", "nodes=0", "slurm.nodes = '0': it must be at least 1"),
        ("slurm", "nodes=two", "slurm.nodes = 'two': it must be a whole number"),
        ("slurm", "nodes=2,gpus", "slurm.nodes = '2,gpus': it must be a whole number"),
        ("slurm", "cpus=-1", "slurm.cpus = '-1': it must be at least 1"),
        ("slurm", "gpus=h100", "slurm.gpus = 'h100': write a number, or TYPE:NUMBER"),
        ("slurm", "gpus=8:h100", "slurm.gpus = '8:h100'"),
        ("slurm", "mem=64GB", "slurm.mem = '64GB': write a number and K, M, G or T"),
        ("slurm", "time=soon", "slurm.time = 'soon': write minutes"),
        ("slurm", "time=1:2:3:4", "slurm.time = '1:2:3:4'"),
        ("slurm", "time=4", "slurm.time = '4': a job is requeued 120 s before its end"),
        ("slurm", "time=04:59", "slurm.time = '04:59': a job is requeued"),
        ("slurm", "partition=a b", "slurm.partition = 'a b': it must have letters"),
        ("slurm", "account=me\n#SBATCH --uid=0", "slurm.account = 'me\\n#SBATCH"),
        ("slurm", "nodes=2 launcher=local", "launcher = local uses one node of 2"),
        ("slurm", "nodes=1 resume=never", "resume = never: a job that is started again goes on"),
        ("slurm", "nodes=1 out_dir=x", "the folder of a job's run is named by --out"),
        ("slurm", "nodes=2 ray.address=a:1", "ray.address = a:1 is not the Ray cluster of the job"),
        ("slurm", "nodes=2,cpus=1", "3 processes take 2 CPUs of each node; raise cpus"),
        ("slurm", "nodes=2,cpus=2 rollout.simulators=4", "6 processes take 3 CPUs of each node"),
        (
            "slurm",
            "nodes=1,gpus=1 placement=hybrid",
            "--slurm nodes=1,gpus=1: placement.preset = hybrid: it takes at least 2 GPUs",
        ),
        (
            "slurm",
            "nodes=1,gpus=4 placement.generators.devices=3-4",
            "gpus=4: placement.generators.devices = 3-4: the cluster has 4 GPUs",
        ),
        ("slurm", "nodes=1 training.mini_batch_samples=0", "training.mini_batch_samples = 0"),
        ("slurm", "nodes=1 init_from=nowhere", "init_from = nowhere: it does not exist"),
        ("kuberay", "nodes=2", "kuberay.image is missing"),
        ("kuberay", "image=i,claim=c,mem=64GB", "kuberay.mem = '64GB'"),
        ("kuberay", "image=i,claim=c,namespace=A_b", "kuberay.namespace = 'A_b'"),
        ("kuberay", "image=i,claim=c launcher=local", "launcher = local uses one node of 1"),
        ("kuberay", "image=i,claim=c training.mini_batch_samples=0", "training.mini_batch_samples = 0"),
    ],
)
def test_what_could_not_train_is_not_submitted(
    option: str, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for queue in ("sbatch", "kubectl"):
        stand_in(queue, "echo 1")
    job, *words = [text] if "\n" in text or text.startswith("partition") else text.split(" ")
    assert main(["train", "cartpole", *words, f"--{option}", job]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
    assert said() == []
    assert not Path("runs").exists()


def test_a_dry_run_belongs_to_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "cartpole", "--dry-run"])
    assert "--dry-run belongs to --slurm and --kuberay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-0", 86400), ("2-3:04", 183840), ("0-0:0:9", 9), ("1:", None)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert time_s(text) == seconds


@pytest.mark.parametrize(
    ("settings", "gb"),
    [
        (SlurmSettings(mem="64G"), 64 * 1.024**3),
        (SlurmSettings(mem="1000"), 1.048576),
        (SlurmSettings(mem="0"), None),
        (SlurmSettings(), None),
        (KubeRaySettings(image="i", claim="c", mem="64Gi"), 64 * 1.024**3),
        (KubeRaySettings(image="i", claim="c", mem="1.5G"), 1.5),
        (KubeRaySettings(image="i", claim="c", mem="2000000k"), 2.0),
    ],
)
def test_memory_is_read_in_the_units_of_the_queue(settings: SlurmSettings | KubeRaySettings, gb: float | None) -> None:
    assert settings.memory_gb == (None if gb is None else pytest.approx(gb))


def test_the_check_is_of_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without a GPU; a preset on enough of them is in order, and what no station uses is told."""
    words = ["train", "cartpole", "placement=hybrid", "rollout.generators=4", "rollout.simulators=12", "--check"]
    assert main([*words, "--slurm", "nodes=1,gpus=8"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 25 CPUs for 24 processes, 24 of them on 8 GPUs" in out
    assert out.endswith("ready to submit; nothing was submitted")
    assert main(["train", "cartpole", "--check", "--slurm", "gpus=h100:2"]) == 0
    assert "the job has 2 GPUs, and this recipe places no station on a device" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*words, "--slurm", "nodes=2,gpus=0"]) == 1
    assert list(Path().iterdir()) == [Path("bin")]


def test_a_job_asks_for_what_the_plan_of_its_nodes_places(capsys: pytest.CaptureFixture[str]) -> None:
    """Planned once, for the nodes that it asks for: the job's file of settings is what starts, and is begun again."""
    config = recipe("placement=auto")
    profile(config).save(Path("latency.profile.json"))
    words = ["latency", *RECIPE, "placement=auto", "--slurm", "nodes=1,gpus=1", "--out", "run", "--dry-run"]
    found = submitted(capsys, *words)
    job = load_config(next(Path(found["folder"]).glob("*/latency.yaml")))
    assert (job.placement.start, job.placement.generators.devices) == ("recipe", "0")
    settings = SlurmSettings(nodes=1, gpus="1")
    cpus = cpus_of_node(job, settings, "slurm", place_job(job, settings, "slurm"))
    assert directives(Path(found["file"]).read_text())["cpus-per-task"] == str(cpus)


def test_a_job_is_checked_by_slurm_and_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    stand_in("sbatch", '[ "$1" = --parsable ] && echo "42;east" || true')
    asked = "nodes=2,gpus=h100:8,cpus=16,mem=64G,time=1-00:00:00,partition=a,b,account=me,qos=high"
    found = submitted(capsys, "cartpole", "training.versions=3", "--slurm", asked, "--out", "my run%")
    script, folder = Path(found["file"]), Path("my run%").absolute()
    assert found["job"] == "42"
    assert found["folder"] == str(folder)
    assert found["cancel"] == "scancel 42"
    assert shlex.quote(str(folder / "job/slurm-42.log")) in found["watch"][1]
    assert said() == [f"sbatch --test-only {script}", f"sbatch --parsable {script}"]
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    text = script.read_text()
    assert directives(text) == {
        "job-name": "cartpole",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "h100:8",
        "exclusive": "",
        "mem": "64G",
        "time": "1-00:00:00",
        "partition": "a,b",
        "account": "me",
        "qos": "high",
        "chdir": str(Path.cwd()),
        "output": f"{Path.cwd()}/my run%%/job/slurm-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "B:USR1@120",
    }
    assert "--num-gpus 8" in text
    words = shlex.split(text.rpartition(" -- \\\n")[2].partition(" &\n")[0])
    assert words == ["polyrhythm", "train", str(folder / "job/cartpole.yaml"), "--out", str(folder), "resume=auto"]
    config = load_config(words[2], words[-1:])
    assert (config.launcher, config.ray.address, config.resume) == ("ray", "auto", "auto")
    assert config.training.versions == 3
    assert config.ray.start_s > 60, "nodes take minutes"
    token = folder / "job/ray_token"
    assert token.stat().st_mode & 0o077 == 0
    assert f"RAY_AUTH_TOKEN_PATH='{token}'" in text


def test_one_node_has_no_ray_and_shares_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = submitted(capsys, "cartpole", "--slurm", "nodes=1", "--dry-run")
    text = Path(found["file"]).read_text()
    assert "symmetric-run" not in text
    assert "RAY" not in text
    assert "exclusive" not in directives(text)
    assert load_config(Path(found["folder"]) / "job/cartpole.yaml").launcher == "local"
    assert "job" not in found


def test_a_run_begins_beside_the_files_of_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    """And the same command goes on with it, in a job of its own, once it is there."""
    words = ["cartpole", "training.versions=1", "evaluation.episodes=2", "launcher=inline"]
    found = submitted(capsys, *words, "--slurm", "nodes=1", "--dry-run", "--out", "run")
    command = shlex.split(Path(found["file"]).read_text().rpartition(" polyrhythm ")[2].partition(" &\n")[0])
    assert main(command) == 0
    assert main(command) == 2, "a finished run is not begun again"
    again = ["cartpole", "training.versions=2", *words[2:], "resume=auto", "--slurm", "nodes=1", "--dry-run"]
    capsys.readouterr()
    assert submitted(capsys, *again, "--out", "run")["folder"] == found["folder"]
    assert main(command) == 0
    assert json.loads(Path("run/summary.json").read_text())["ledger"]["trained"] == 32


@pytest.mark.parametrize(
    ("sbatch", "told"),
    [
        ("", "sbatch is not found on this machine; the job is written: "),
        ("echo 'error: invalid partition specified: a' >&2; exit 1", "refuses the job (error: invalid partition"),
        ("exit 3", "refuses the job (it ended with status 3)"),
        ('[ "$1" = --test-only ] || { echo no >&2; exit 1; }', "sbatch --parsable refuses the job (no)"),
    ],
)
def test_what_slurm_refuses_stays_written(sbatch: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    if sbatch:
        stand_in("sbatch", sbatch)
    assert main(["train", "cartpole", "--slurm", "partition=a", "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(Path("run/job/job.sh").absolute()) in error
    assert Path("run/job/job.sh").is_file()


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not on this machine")
def test_slurm_takes_the_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = submitted(capsys, "cartpole", "--slurm", "nodes=1", "--dry-run")
    monkeypatch.undo()
    subprocess.run(["sbatch", "--test-only", found["file"]], check=True, timeout=60)


def example_job() -> tuple[TrainingJob, SlurmSettings]:
    """The job of the example, with the paths of nobody."""
    run = Path("/home/me/project/runs/cartpole/20261128-120000")
    recipe = run / "job/cartpole.yaml"
    words = ("polyrhythm", "train", str(recipe), "--out", str(run), "resume=auto")
    given = "polyrhythm train cartpole --slurm nodes=3,cpus=8,time=04:00:00"
    return TrainingJob("cartpole", words, 8, recipe, str(run), True, given), SlurmSettings(
        nodes=3, cpus=8, time="04:00:00"
    )


def test_the_example_is_what_the_command_writes() -> None:
    job, settings = example_job()
    assert EXAMPLE.read_text() == slurm.script_of(job, settings, "/home/me/project", "/home/me/project/.venv/bin")


def test_the_job_is_requeued_when_its_time_is_nearly_up_and_calls_the_same_command() -> None:
    """With commands that say how they were called; the signal comes while the first `srun` is at it."""
    # More names than a pipe takes: who reads them has to read all.
    stand_in("scontrol", '[ "$1" != show ] || seq --format node-%g 20000')
    stand_in("getent", "echo 10.0.0.1 STREAM node-1")
    stand_in("srun", "[ -e begun ] || { touch begun; kill -USR1 $PPID; exec sleep 5; }")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "3", "PATH": os.environ["PATH"]}
    codes = [subprocess.run(["bash", EXAMPLE], env=variables, timeout=20, check=False).returncode for _ in "12"]
    runs = [line for line in said() if line.startswith("srun")]
    assert said().count("scontrol requeue 7") == 1
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert "--address 10.0.0.1:6390 --min-nodes 3 --num-cpus 8" in runs[0]
    assert runs[0].endswith("--out /home/me/project/runs/cartpole/20261128-120000 resume=auto")
    assert codes[1] == 0, "that of the run"


def test_a_job_for_kuberay_is_created(capsys: pytest.CaptureFixture[str]) -> None:
    stand_in("kubectl", "")
    Path("My_own recipe.yaml").write_text("extends: cartpole\ntraining: {versions: 7}\n")
    asked = "image=reg.io/me/x:1,claim=vol,nodes=3,gpus=1,cpus=4,mem=16Gi,namespace=ml"
    found = submitted(capsys, "My_own recipe.yaml", "--kuberay", asked)
    file = Path(found["file"])
    create = f"kubectl create --filename {file} --namespace ml"
    assert said()[0].startswith(f"{create} --dry-run=server --validate=strict")
    assert said()[1].startswith(f"{create} --request-timeout")
    recipe, job = yaml.safe_load_all(file.read_text())
    name = job["metadata"]["name"]
    assert (recipe["metadata"], found["job"]) == (job["metadata"], name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", name)
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["polyrhythm", "train", "/job/My_own-recipe.yaml"]
    assert words[-1] == "resume=auto"
    Path("seen.yaml").write_text(recipe["data"][Path(words[2]).name])
    config = load_config("seen.yaml")
    assert (config.training.versions, config.launcher, config.ray.address) == (7, "ray", "auto")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray_version()
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/job"} < set(mounts)
        assert any(words[4].startswith(f"{path}/") for path in mounts)
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("recipe", ["a" * 60, "7", "-x-", "Ä_b.c"])
def test_names_of_jobs_are_those_that_kubernetes_takes(recipe: str) -> None:
    job, _ = example_job()
    for folder in ("20261128-120000", "20261128-120000-2", "my run", "x" * 80, "___", "Ä"):
        _, out = kuberay.paths(Path(f"{recipe}.yaml"), Path("runs", folder))
        one = TrainingJob(recipe, job.words, 1, job.recipe, out, True, "")
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", kuberay.name_of(one)), kuberay.name_of(one)


def test_each_folder_here_has_a_run_and_a_name_of_its_own_in_kubernetes() -> None:
    job, _ = example_job()

    def names(out: str) -> tuple[str, str]:
        _, seen = kuberay.paths(job.recipe, Path(out))
        return seen, kuberay.name_of(TrainingJob(job.name, job.words, 1, job.recipe, seen, True, ""))

    made = [names(out) for out in ("exp1/seed0", "exp2/seed0", "seed0", "exp1/seed-0", f"exp1/{'x' * 60}seed0")]
    assert all(len(set(own)) == len(made) for own in zip(*made, strict=True))
    assert names(str(Path("exp2/../exp1/seed0").absolute())) == made[0], "the same folder goes on with its run"


def test_files_that_an_image_may_have_do_not_stop_a_job_for_kuberay(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "metaworld_pi0", "placement=null", "devices=1", "--check"]
    assert main([*words, "--kuberay", "image=i,claim=c"]) == 0
    assert "(on this machine; the nodes may have it)" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--slurm", "nodes=1"]) == 3


def test_the_page_has_the_example_and_every_key() -> None:
    text = (ROOT / "docs/clusters.md").read_text()
    assert "examples/ray/slurm.sh" in text
    assert all(f"`{key}`" in text for keys in KEYS.values() for key in keys)
