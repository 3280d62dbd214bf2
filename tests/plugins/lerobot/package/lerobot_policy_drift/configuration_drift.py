"""Configuration of the policy `drift`."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig


@PreTrainedConfig.register_subclass("drift")
@dataclass
class DriftConfig(PreTrainedConfig):
    """The policy predicts `chunk_size` actions, of which `n_action_steps` are executed."""

    chunk_size: int = 4
    n_action_steps: int = 3
    width: int = 16
    num_steps: int = 4
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {"STATE": NormalizationMode.MEAN_STD, "ACTION": NormalizationMode.MEAN_STD}
    )

    @property
    def observation_delta_indices(self) -> list[int]:
        return [0]

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig()

    def get_scheduler_preset(self) -> Any:
        return None

    def validate_features(self) -> None:
        pass
