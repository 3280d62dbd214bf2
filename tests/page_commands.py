"""The commands of README and docs/, where each of them is run, and with which names."""

from __future__ import annotations

import io
import itertools
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.cli.test_resume import cut

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(polyrhythm(?: [^`]+)?)`")

#: Why a command is run by no test: reason → commands, by their first words or by one word that they have.
NOT_RUN = {
    "downloads": ("envs setup",),
    "needs GPUs or released weights": ("sft metaworld_pi0", "train metaworld_pi0 devices=1 init_from"),
    "needs a server of a language model, or vLLM": ("policy.engine",),
    "needs a package that make setup does not install": (
        "bench peers", "bench envs --only maniskill", "pusht.yaml", "eval runs/fetch_reach_pixels",
        "eval runs/robosuite_lift",
    ),
    "is a form, not a command": ("train …",),
}  # fmt: skip

#: Commands that another file runs, by the same marks → that file, and what it says.
ELSEWHERE = {
    "check line.yaml": ("tests/test_own_environments.py", '"check", "line.yaml"'),
    "train line.yaml algorithm.loss": ("tests/test_extending.py", "algorithm.loss={type: acme_squared"),
    "train line.yaml demonstrations": ("tests/test_extending.py", "demonstrations={dataset: {format: acme_npz"),
    "train line.yaml tracking": ("tests/test_extending.py", "tracking=[{type: acme_lines"),
    "train line.yaml": ("tests/test_own_environments.py", '"train", "line.yaml"'),
    "bench envs": ("bench/tests/test_envs.py", '"bench", "envs", "--only"'),
    "bench gpu": ("bench/tests/test_gpu.py", '"bench", "gpu", "--tiny"'),
    "chaos cartpole": ("bench/tests/test_chaos.py", "chaos(validate_run(chaos_config("),  # without its limits of time
    "--push": ("tests/plugins/hub/test_names.py", "hub_files.push(made"),
    "eval NAME": ("tests/plugins/hub/test_names.py", "hf://me/"),
    "eval RUN policy.checkpoint=NEW": ("tests/pipeline/test_moved_folders.py", 'f"policy.checkpoint={new}"'),
    "--gpus": ("tests/plugins/planning/test_placing.py", "the three examples of docs/planning.md"),
    "policies inspect": ("tests/plugins/pretrained/test_policies_folders.py", '"inspect", GOLDEN'),
    "policies export": ("tests/plugins/language/test_causal_lm_adapters.py", '"export", run'),
    "policies merge": ("tests/plugins/language/test_causal_lm_adapters.py", '"merge", tmp_path / "adapters"'),
    "--slurm": ("tests/plugins/cluster/test_submit.py", '"--slurm", "nodes'),
    "--kuberay": ("tests/plugins/cluster/test_submit.py", '"--kuberay", "image'),
    "cluster HEAD": ("tests/plugins/cluster/process/test_ray_devices.py", 'main(["cluster", two_nodes.address])'),
    "ray.address": ("tests/plugins/cluster/process/test_ray.py", '"address"'),
}  # fmt: skip

#: Commands that take more than a moment, by the same marks → what is appended, so that they end in a minute or two.
#: They run where LONG_TESTS is set; so does each `train`, whose start alone is checked elsewhere.
LONG: dict[str, tuple[str, ...]] = {
    "bench switch": ("--megabytes", "8", "--repeats", "1"),
    "eval compare": ("--episodes", "4"),
    "compare": (),
    "demos": ("--episodes-per-task", "1"),
    "--video": (),
    "--variants": (),
    "plan metaworld_pi0 devices=1 --memory": ("--devices", "1", "--device-memory", "80"),  # the GPU that is not here
    "plan quickstart_pi0": (),
    "plan metaworld_pi0 --memory": (),
    "plan metaworld_pi0_24gb": (),
    "policies openvla_oft": (),
    "init_from=runs/start": (),
    "resume": (),
    "sft": ("supervised.steps=2", "supervised.warmup_steps=0", "demonstrations.episodes_per_task=2"),
    "sweep": ("training.versions=1", "evaluation.episodes=4", "rollout.rows=4"),
    "launcher=ray": (),
    "watch": (),
}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(body) for _, language, body in found if language in languages]


def _commands(page: Path) -> Iterator[list[str]]:
    """Words after `polyrhythm` of each command in a block of a terminal or in the text."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(blocks(page, "", "bash", "console", "sh", "text")).replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines] + _INLINE.findall(_BLOCK.sub("", text))
    for command in found:
        if re.match(r"polyrhythm( |$)", command):
            yield list(itertools.takewhile(lambda word: not re.fullmatch("[|>&;]+", word), _words(command)))[1:]


def _words(command: str) -> Iterator[str]:
    """A shell's words; comments are left out, redirections are words."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    return iter(lexer)


ALL = sorted({(page_id(page), tuple(words)) for page in PAGES for words in _commands(page)})


def mark_of(words: Sequence[str], marks: Iterable[str]) -> str | None:
    """The first mark that the command has: its first words, or, if the mark is one word, the begin of any option."""
    return next((mark for mark in marks if _has(words, mark)), None)


def _has(words: Sequence[str], mark: str) -> bool:
    if " " in mark:
        return " ".join(words).startswith(mark)
    return words[0] == mark or any(word.startswith(mark) for word in words[1:])


def not_run(words: Sequence[str]) -> str | None:
    """Why no test runs the command; None if one does."""
    if not words:
        return "is a form, not a command"
    return next((reason for reason, marks in NOT_RUN.items() if mark_of(words, marks)), None)


def runs_here(words: Sequence[str]) -> bool:
    return not_run(words) is None and (len(words) == 1 or mark_of(words, ELSEWHERE) is None)


def quick(words: Sequence[str]) -> bool:
    """Whether the usual suite runs it; a command's name alone is run with --help."""
    return runs_here(words) and (len(words) == 1 or mark_of(words, LONG) is None)


#: Names of the pages that stand for a file or a folder → what is made of it: a run, a checkpoint, a folder to write.
_NAMES = {
    "RECIPE": "cartpole", "R": "cartpole", "SECTION": "training", "SECTION.KEY": "training.versions", "CODE": "PR104",
    "module:Class": "tests.pipeline.pictures:LampSettings",
    "mine:Settings": "examples.own_policy.bounded:BoundedSettings",
}  # fmt: skip
_FORMS = ("[section.key=value", "...]", "[--json]")


def ready(words: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The command with names that exist. names: for RUN, A, B, NEW, FILE, and for runs/cartpole and so on (a run's
    time is left out), of which a longer beginning goes before a shorter one."""
    if len(words) == 1:
        return [*words, *["--help"] * (words[0] not in ("recipes", "settings"))]
    of_command = {"TYPE": "categorical" if words[0] == "policies" else "gymnasium"}
    if words[0] == "sft":
        of_command["RECIPE"] = "quickstart"  # has demonstrations
    known = _NAMES | dict(names) | of_command
    return [_named(word, known) for word in words if word not in _FORMS]


def _named(word: str, known: Mapping[str, str]) -> str:
    if word in known:
        return known[word]
    key, separator, value = word.rpartition("=")
    end = "/best.pt" if value.endswith("/best.pt") else ""
    begins = [name for name in known if value == name + end or ("/" in name and value.startswith(name))]
    if begins:
        return key + separator + known[max(begins, key=len)] + end
    return re.sub(r"=N$", "=1", word)


#: Of commands that differ in a seed or in numbers of episodes and versions alone, one runs.
_LENGTHS = re.compile(r" (?:(?:\w+\.)?seed|training\.versions|evaluation\.\w+)=\S+| --seed \d+")


def one_of(words: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return sorted({_LENGTHS.sub("", " ".join(ready(one, {}))): one for one in words}.values())


def status_of(words: Sequence[str], folder: Path) -> int:
    """Of a command in `folder`, which has the pages' cluster.yaml and a link to the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("sys.stdin", io.StringIO("train\nca"))  # what `completion words` completes
        try:
            return main(words)
        except SystemExit as end:  # of --help
            return int(end.code or 0)


def few_of(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Overrides that end a training of the recipe after an update, from few demonstrations."""
    config = load_config(recipe, overrides)
    versions = config.training.critic_warmup_updates + 1
    few = [f"training.versions={versions}", "evaluation.episodes=4", "evaluation.every=0"]
    few += ["supervised.steps=2", "supervised.warmup_steps=0"] if config.supervised else []
    return few + (["demonstrations.episodes_per_task=2"] if config.demonstrations else [])


class Runs:
    """Runs of cartpole and of the quickstart, each made when it is first asked for, in a folder that pages assume."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, dict[str, Path]()
        (folder / "examples").symlink_to(ROOT / "examples")
        (file,) = (block for block in blocks(ROOT / "docs/clusters.md", "yaml") if block.startswith("nodes:"))
        (folder / "cluster.yaml").write_text(file)

    def get(self, name: str) -> Path:
        """cartpole, other (another seed), quickstart: finished; start: of `sft`."""
        if name not in self._made:
            small = ["launcher=inline", "evaluation.episodes=4", "rollout.rows=4"]
            small += ["checkpoint.run_every_s=0", "checkpoint.keep_last=3"]
            words = {
                "cartpole": ["train", "cartpole", "training.versions=2", "evaluation.every=1", *small],
                "other": ["train", "cartpole", "training.versions=1", "seed=1", *small],
                "quickstart": ["train", "quickstart", *few_of("quickstart")],
                "start": ["sft", "quickstart", *LONG["sft"]],
            }[name]
            folder = self.folder / "made" / name
            assert status_of([*words, "--out", str(folder)], self.folder) == 0
            self._made[name] = folder
        return self._made[name]

    def names(self, words: Sequence[str], new: Path) -> dict[str, str]:
        """What `ready` asks for, of the runs that this command names; `new`: what it writes."""
        drawn = any(word.startswith(("--video", "--variants")) or word == "demos" for word in words)
        run = str(self.get("quickstart" if drawn else "cartpole"))
        names = dict.fromkeys(("RUN", "RUN_OR_CHECKPOINT", "A", "runs/"), run) | {"shown.gif": f"{new}.gif"}
        names |= {"NEW": str(new), "FOLDER": str(new), "FILE": names["shown.gif"] if drawn else "small"}
        if "--cluster" in words:
            names["FILE"] = "cluster.yaml"
        if "compare" in words:
            names |= dict.fromkeys(("B", "runs/higher-lr"), str(self.get("other")))
        if "init_from=runs/start" in words:
            names["runs/start"] = str(self.get("start"))
        if words[0] == "sft":
            names["runs/start"] = str(new)
        if words[0] == "resume":
            cut(Path(shutil.copytree(run, new)), versions=2)
            names |= dict.fromkeys(("RUN", "runs/"), str(new))
        return names
