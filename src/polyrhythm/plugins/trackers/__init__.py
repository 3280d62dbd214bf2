"""Trackers: each run is written to TensorBoard, and to the experiment trackers that `tracking` names."""

from polyrhythm.plugin import Plugin

_SINKS = f"{__name__}.sinks"
PLUGIN = Plugin(
    "trackers",
    adds={
        "tracking": {
            "tensorboard": f"{_SINKS}.tensorboard:TensorBoardSettings",
            "wandb": f"{_SINKS}.wandb:WandbSettings",
            "mlflow": f"{_SINKS}.mlflow:MlflowSettings",
            "trackio": f"{_SINKS}.trackio:TrackioSettings",
            "swanlab": f"{_SINKS}.swanlab:SwanlabSettings",
        },
        "observer": {"trackers": f"{__name__}.hooks:HOOKS"},
        "check": {"trackers": f"{__name__}.checks:CHECKS"},
    },
)
