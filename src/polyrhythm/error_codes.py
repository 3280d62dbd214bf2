"""Short stable codes of the messages that a user gets; docs/troubleshooting.md has cause and remedy of each.

A code stands for one kind of cause. It is found from the error's class and from words of its sentence, so raising an
error needs no number. A code keeps its meaning; one that is no longer used is not given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Code(NamedTuple):
    """A kind of cause. error: name of the error's class or of a base; words: one of them is in the sentence, or
    at its start if written ^word; any sentence if there are none."""

    name: str
    error: str
    words: Sequence[str] = ()


#: The first one that fits counts. The last of a class has no words.
CODES = (
    Code("PR201", "MissingError", ("is not installed", "needs transformers", "needs peft", "there is no module")),
    Code("PR202", "MissingError", ("no such folder", "no such file", "is not there", "not exist", "download them")),
    Code("PR203", "MissingError", ("; use cpu", "no CUDA device", "placement.preset = ")),
    Code("PR204", "MissingError", ("Vulkan", "ManiSkill", "LIBERO", "assets", "env.python = ", "env.registered_by")),
    Code("PR200", "MissingError"),
    Code("PR101", "ConfigError", ("no such key", "no such setting")),
    Code("PR102", "ConfigError", ("named recipes ", "extends = ", "is a folder; ", "no such example")),
    Code("PR103", "ConfigError", ("is missing; add it", "no value after =")),
    Code("PR104", "ConfigError", ("it must be ", "known types are")),
    Code("PR105", "ConfigError", ("cannot be imported", "cannot import;", "module:function", "name a function of it",
                                  "a settings class")),
    Code("PR106", "ConfigError", ("correct the environment", "spec()", "as in the old gym", "return it as declared")),
    Code("PR107", "ConfigError", ("tokenizer", "begin token")),
    Code("PR108", "ConfigError", ("checkpoint = ", "its weights cannot be read", "where it was released")),
    Code("PR109", "ConfigError", ("leave it out", "set it to ", "; lower ", "only env.SETTING may differ")),
    Code("PR110", "ConfigError", ("^--", "; add --random")),
    Code("PR111", "ConfigError", ("^env",)),
    Code("PR112", "ConfigError", ("^policy",)),
    Code("PR113", "ConfigError", ("^rollout.", "^batching", "^freshness.", "^groups.", "^training.", "^evaluation.")),
    Code("PR114", "ConfigError", ("^placement", "^devices", "^launcher", "^ray.", "^join.", "^scoring.")),
    Code("PR115", "ConfigError", ("^algorithm.", "^objective")),
    Code("PR116", "ConfigError", ("^demonstrations", "^supervised", "^these demonstrations")),
    Code("PR100", "ConfigError"),
    Code("PR301", "RunFolderError", ("is finished", "has trained", "is not finished")),
    Code("PR302", "RunFolderError", ("is not empty", "is there already", "is in use by process")),
    Code("PR303", "RunFolderError", (" here but ", "the data changed", "other settings", "^init_from", "them equal")),
    Code("PR304", "RunFolderError", ("cannot be made", "cannot be written", "move it away")),
    Code("PR305", "RunFolderError", ("copy it again", "the dataset", "of a dataset", "record them again")),
    Code("PR306", "RunFolderError", ("version of polyrhythm", "undo that")),
    Code("PR307", "RunFolderError", ("damaged", "cannot be read", "invalid content")),
    Code("PR308", "RunFolderError", ("not a run's folder", "is not there", "has no ", "holds no ")),
    Code("PR300", "RunFolderError"),
    Code("PR401", "RenderingUnavailable"),
    Code("PR402", "StartError", ("shared memory: ",)),
    Code("PR403", "StartError", ("raise the limit",)),
    Code("PR404", "StartError", ("the address ", "cannot be opened", "can reach this run's sockets")),
    Code("PR405", "StartError", ("policy.type = ",)),
    Code("PR406", "StartError", ("ray.", "RAY_AUTH")),
    Code("PR407", "StartError", ("^--slurm", "^--kuberay", "the job", "submit it again")),
    Code("PR408", "StartError", ("token", "no run answers", "the run ", "not an address of a run")),
    Code("PR409", "StartError", ("rank 0", "the trainer's ranks", "agent")),
    Code("PR400", "StartError"),
    Code("PR501", "RunDistrusted"),
    Code("PR502", "HostLost"),
    Code("PR503", "RunHalted", ("; the last: ",)),
    Code("PR504", "RunHalted", ("the environment", "env.build", "correct act", "name one or more of")),
    Code("PR505", "RunHalted", ("was dropped",)),
    Code("PR506", "RunHalted", ("the expert ", "the demonstrat", "supervised.lr")),
    Code("PR507", "RunHalted", ("policy.engine", "its engine refused")),
    Code("PR508", "RunHalted", ("make room", "free memory", "SIGKILL")),
    Code("PR500", "RunHalted"),
    Code("PR601", "PluginError"),
    Code("PR602", "WorkflowError"),
    Code("PR603", "EnvLost"),
    Code("PR604", "ModuleNotFoundError"),
    Code("PR605", "OSError"),
    Code("PR600", "PolyrhythmError"),
)  # fmt: skip

#: Code of a command line that argparse refuses.
COMMAND_LINE = "PR110"


def code_of(error: BaseException, sentence: str = "") -> str:
    """Code of an error, or of one of its sentences; "" for errors that are not a user's, such as a KeyError."""
    text = sentence or next(iter(getattr(error, "problems", ())), str(error))
    classes = {kind.__name__ for kind in type(error).__mro__}
    return next((code.name for code in CODES if code.error in classes and _fits(code.words, text)), "")


def _fits(words: Sequence[str], text: str) -> bool:
    return not words or any(text.startswith(word[1:]) if word[0] == "^" else word in text for word in words)
