"""A RayJob of KubeRay 1.5.1 or newer: its manifest, and `kubectl`.

A pod is a node: one is Ray's head, on which the run is started, the others are workers. The settings of the run are a
ConfigMap, so that a recipe of the user's own need not be in the image. A job that KubeRay starts again goes on with the
run in its folder (resume=auto).
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.submit.job import Submission, TrainingJob, ask
from polyrhythm.plugins.cluster.submit.options import KubeRaySettings

#: Where pods have the run's volume and the job's files.
RUNS, FILES, SHARED_MEMORY = "/runs", "/job", "/dev/shm"  # noqa: S108 - of a pod
#: Longest name that KubeRay takes for a RayJob; times that it starts a failed job again.
_NAME, _BACKOFF = 47, 3
#: Characters of a folder in the name of its job; `20261128-120000-12-1a2b3c4d` has 27.
_STAMP = 28
_PIN = re.compile(r"ray(?:\[[^]]*\])?==([\d.]+)")


HERE, SETTINGS = False, KubeRaySettings


def paths(recipe: Path, folder: Path) -> tuple[str, str]:
    """Pods have the run's settings from the ConfigMap, and its folder in the volume: another one for each folder here,
    since folders that differ may have the same last part."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{FILES}/{recipe.name}", f"{RUNS}/{recipe.stem}/{folder.name}-{digest}"


def name_of(job: TrainingJob) -> str:
    """The job's name in Kubernetes: its recipe and the last part of its folder."""
    recipe, folder = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (job.name, Path(job.out).name))
    folder = folder[-_STAMP:].strip("-")
    return f"r-{recipe}"[: _NAME - len(folder) - 1].rstrip("-") + f"-{folder}"


def write(job: TrainingJob, settings: KubeRaySettings) -> Path:
    """Write the manifest."""
    file = job.recipe.with_name("rayjob.yaml")
    text = yaml.dump_all(manifest(job, settings), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=1000)
    file.write_text(f"# {job.given}\n{text}", encoding="utf-8")
    return file


class _Plain(yaml.SafeDumper):
    """Writes each part in full, and text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (of any)
        return True


_Plain.add_representer(
    str, lambda own, text: own.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def submit(file: Path, settings: KubeRaySettings) -> Submission:
    """Have Kubernetes check the manifest, and create the job. StartError: it is refused, or kubectl is not here."""
    *_, ray_job = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    name = ray_job["metadata"]["name"]
    within = ["--namespace", settings.namespace] if settings.namespace else []
    create = ["kubectl", "create", "--filename", str(file), *within]
    if shutil.which("kubectl") is None:
        raise StartError(
            f"--kuberay: kubectl is not found on this machine; the job is written: {file}; submit it where kubectl is: "
            f"{shlex.join(create)}"
        )
    ask([*create, "--dry-run=server", "--validate=strict", "--request-timeout=30s"], file)
    ask([*create, "--request-timeout=30s"], file)
    own = shlex.join(within) and f"{shlex.join(within)} "
    watch = (f"kubectl {own}get rayjob {name} --watch", f"kubectl {own}logs --follow --selector job-name={name}")
    return Submission(name, watch, f"kubectl {own}delete --filename {shlex.quote(str(file))}")


def manifest(job: TrainingJob, settings: KubeRaySettings) -> list[dict[str, Any]]:
    """The ConfigMap and the RayJob."""
    name = name_of(job)
    named = {"name": name} | ({"namespace": settings.namespace} if settings.namespace else {})
    pods = {"rayStartParams": {"num-cpus": str(job.cpus)}, "template": {"spec": _pod(job, settings, name)}}
    workers = settings.nodes - 1
    groups = [{"groupName": "workers", "replicas": workers, "minReplicas": workers, "maxReplicas": workers, **pods}]
    cluster: dict[str, Any] = {"rayVersion": _ray_version(), "authOptions": {"mode": "token"}, "headGroupSpec": pods}
    if workers:
        cluster["workerGroupSpecs"] = groups
    spec = {
        "entrypoint": job.command,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 60,
        "backoffLimit": _BACKOFF,
        "rayClusterSpec": cluster,
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": named,
            "data": {job.recipe.name: job.recipe.read_text(encoding="utf-8")},
        },
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": named, "spec": spec},
    ]


def _ray_version() -> str:
    """Of the extra `ray` of this distribution, which the image has."""
    (version,) = {found[1] for line in metadata.requires("polyrhythm") or () if (found := _PIN.match(line))}
    return version


def _pod(job: TrainingJob, settings: KubeRaySettings, name: str) -> dict[str, Any]:
    sizes: dict[str, str | int] = {"cpu": str(job.cpus)}
    if settings.mem is not None:
        sizes["memory"] = settings.mem
    if settings.devices:
        sizes["nvidia.com/gpu"] = settings.devices
    container = {
        "name": "ray",
        "image": settings.image,
        "resources": {"requests": dict(sizes), "limits": dict(sizes)},
        "env": [{"name": "RAY_worker_niceness", "value": "0"}],  # else stations have a nice value of 15
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "job", "mountPath": FILES},
            {"name": "shm", "mountPath": SHARED_MEMORY},
        ],
    }
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "job", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a pod's own has 64 MiB
    ]
    return {"containers": [container], "volumes": volumes}
