"""Action and observation specs, trajectories and masks, shared by environments, policies and training.

Standard library and numpy only; `model_folder` also opens tokenizers.
"""

from polyrhythm.specs.hashing import split_seed
from polyrhythm.specs.scores import SampleView, Score, Transcript
from polyrhythm.specs.spaces import (
    INSTRUCTION,
    PROGRESS,
    ActionSpec,
    Aggregate,
    ArraySpec,
    EnvSpec,
    Task,
)
from polyrhythm.specs.trajectory import Trajectory
from polyrhythm.specs.weights import PlacedTensor, WeightsLayout, WeightSpec

__all__ = [
    "INSTRUCTION",
    "PROGRESS",
    "ActionSpec",
    "Aggregate",
    "ArraySpec",
    "EnvSpec",
    "PlacedTensor",
    "SampleView",
    "Score",
    "Task",
    "Trajectory",
    "Transcript",
    "WeightSpec",
    "WeightsLayout",
    "split_seed",
]
