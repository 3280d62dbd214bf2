"""Evaluate a trained policy on held-out seeds: success rate with its Wilson 95% interval."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from polyrhythm.cli import show
from polyrhythm.cli.arguments import count, whole
from polyrhythm.plugin import load, plugins

log = logging.getLogger(__name__)

#: Omitted from the lines of the result; variants and conversations are printed separately.
_LEFT_OUT = frozenset({"per_episode", "conversations", "variants", "kinds"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    purposes = [item for plugin in plugins().values() for item in plugin.purposes.items()]
    parser.epilog = "\n".join(f"{purpose}." for name, purpose in purposes if name.startswith("eval "))
    parser.add_argument(
        "path",
        metavar="RUN_OR_CHECKPOINT",
        help="folder of a run (its newest weights), its best.pt or policy.pt, or one of its checkpoints/run-*; or hf://owner/name",
    )
    parser.add_argument(
        "policy",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="env.NAME: another setting of the environment, which the result lists; policy.checkpoint, "
        "policy.tokenizer: where the released folder that the run began from is now, if it was moved; policy.engine: "
        "of a language model, what generates its tokens; policy.temperature, policy.top_k, policy.top_p: how they are "
        "sampled",
    )
    parser.add_argument(
        "--episodes",
        type=count,
        metavar="N",
        help="initial states over all tasks (default: the run's evaluation, else 128)",
    )
    parser.add_argument("--seed", type=whole, metavar="S", help="seed of the held-out episodes (default: the run's)")
    mode = parser.add_mutually_exclusive_group()
    greedy = "act without noise (default, unless a setting of sampling is given)"
    mode.add_argument("--greedy", action="store_const", const=True, help=greedy)
    sampled = "sample actions, as in training"
    mode.add_argument("--sampled", action="store_const", const=False, dest="greedy", help=sampled)
    parser.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="sample each initial state N times, for mean@N and pass@k (default: 1, with --sampled the run's "
        "evaluation.samples)",
    )
    parser.add_argument(
        "--swap-instructions",
        action="store_true",
        help="show each task another's instruction: a policy that follows instructions fails",
    )
    parser.add_argument(
        "--variants",
        default="",
        metavar="NAME,...",
        help="play the same episodes in these variants of the environment too (all: in each that it has)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--video", type=Path, metavar="FILE", help="write the first episodes to FILE.gif or FILE.mp4")
    shown.add_argument(
        "--gallery",
        action="store_true",
        help="keep every episode, with a video of it, in the run's folder gallery, for its report",
    )
    parser.add_argument(
        "--video-episodes", type=count, metavar="N", help="first episodes that are shown (--video: 9, --gallery: all)"
    )
    parser.add_argument(
        "--conversations",
        type=whole,
        metavar="N",
        help="first episodes of a text environment to print with what was said (default: the run's, 4)",
    )
    parser.add_argument(
        "--conversations-file",
        type=Path,
        metavar="FILE",
        help="write those of the evaluation and of each variant to FILE, an episode a line of JSON",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with every episode's outcome")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import ConfigError
    from polyrhythm.observe.run_folder import take_file
    from polyrhythm.pipeline.evaluation.standalone import Conditions, Gallery, Video, evaluate
    from polyrhythm.pipeline.hooks import open_display
    from polyrhythm.sources import fetched_folder

    video: Video | Gallery | None = None
    filmed = arguments.video_episodes
    if arguments.video:
        video = Video(arguments.video, filmed or 9)
    elif arguments.gallery:
        video = Gallery(arguments.path, filmed, " ".join(arguments.policy))
    elif filmed:
        raise ConfigError(f"--video-episodes = {filmed}: there is no video; name its file with --video")
    if file := arguments.conversations_file:
        if arguments.conversations == 0:
            raise ConfigError("--conversations = 0: --conversations-file would have nothing; leave one of them out")
        take_file(file)
    variants = tuple(filter(None, arguments.variants.split(",")))
    with open_display(sys.stderr) as live:
        result = evaluate(
            fetched_folder(arguments.path, what="eval"),
            arguments.episodes,
            arguments.seed,
            arguments.greedy,
            Conditions(arguments.swap_instructions, variants, arguments.conversations, arguments.samples),
            live,
            video,
            arguments.policy,
        )
    if file and not load("observer", "conversations").append(file, result):
        log.warning(
            "%s is not written: no conversation was kept, since the environment is none of text, or the run has "
            "evaluation.conversations = 0 (then give --conversations N)",
            file,
        )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        shown = {name: value for name, value in result.items() if name not in _LEFT_OUT}
        print(show.lines(show.flat(shown)))
        if result.get("variants"):
            print(f"\n{show.variants(result)}")
        if said := result.get("conversations"):
            encoding = sys.stdout.encoding or "ascii"
            lines = load("observer", "conversations").lines(said)
            print(f"\n{lines}".encode(encoding, "backslashreplace").decode(encoding))
    return 0
