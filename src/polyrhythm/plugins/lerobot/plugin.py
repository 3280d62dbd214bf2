"""Registers the plugin: demonstrations as folders in the LeRobotDataset layout: written, read, recorded."""

from polyrhythm.checks import Check, CheckContext, Result
from polyrhythm.plugin import Plugin


def _dataset(context: CheckContext) -> Result:
    """The dataset that is imitated first, if any; only its small files are read. A resumed run may have a copy."""
    config = context.config
    dataset = config.demonstrations.dataset if context.trainer and config.demonstrations is not None else None
    if dataset is None or dataset.format != "lerobot":
        return ()
    if config.init_from or config.resume != "never":
        return ()
    from polyrhythm.plugins.lerobot.checking import check_dataset

    found = check_dataset(dataset, context.spec, config.rollout.action_repeat)
    return f"{len(found.episodes)} episodes of {found.folder}"


CHECKS = (Check("demonstrations", "training", "machine", _dataset, needs=("form",), after="first weights"),)
PLUGIN = Plugin(
    "lerobot",
    adds={
        "check": {
            "demonstrations": "polyrhythm.plugins.lerobot.plugin:CHECKS",
        },
        "demonstrations": {
            "lerobot": "polyrhythm.plugins.lerobot.reading",
        },
        "command": {
            "demos": "polyrhythm.plugins.lerobot.demos",
        },
    },
    purposes={
        "demos": "record demonstrations of the environment's expert",
    },
)
