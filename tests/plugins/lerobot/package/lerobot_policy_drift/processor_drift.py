"""Processors of the policy `drift`, with a step of the package's own and none that moves tensors."""

from dataclasses import dataclass
from typing import Any

from lerobot.processor import ObservationProcessorStep, ProcessorStepRegistry
from lerobot.processor.factory import make_default_policy_processor_steps, make_policy_processor_pipelines

from .configuration_drift import DriftConfig


@ProcessorStepRegistry.register(name="drift_halved")
@dataclass
class Halved(ObservationProcessorStep):
    """Halves the state."""

    def observation(self, observation: Any) -> Any:
        return {**observation, "observation.state": observation["observation.state"] / 2}

    def transform_features(self, features: Any) -> Any:
        return features


def make_drift_pre_post_processors(config: DriftConfig, dataset_stats: Any = None) -> Any:
    steps = make_default_policy_processor_steps(config, dataset_stats)
    return make_policy_processor_pipelines(
        input_steps=[steps.add_batch_dim, steps.normalize, Halved()], output_steps=[steps.unnormalize]
    )
