"""The policy `drift`: a flow from noise to actions, with the members that `policy.type: lerobot_flow` trains."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn

from .configuration_drift import DriftConfig


class DriftPolicy(PreTrainedPolicy):
    """Velocity of x [B,H,A] at time t [B], from the state alone."""

    config_class = DriftConfig
    name = "drift"

    def __init__(self, config: DriftConfig, **_: Any) -> None:
        super().__init__(config)
        self.entries = config.action_feature.shape[0]
        self.encoder = nn.Linear(config.robot_state_feature.shape[0], config.width)
        self.field = nn.Linear(config.width + self.entries + 1, self.entries)

    @property
    def flow_shape(self) -> tuple[int, int, int]:
        return self.config.chunk_size, self.entries, self.config.width

    def flow_prefix(self, batch: Mapping[str, Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        code = torch.tanh(self.encoder(batch["observation.state"]))
        return [(code, code)], torch.ones(len(code), 1, dtype=torch.bool, device=code.device), code

    def flow_velocity(self, kept: Sequence[tuple[Tensor, Tensor]], _: Tensor, x: Tensor, t: Tensor) -> Tensor:
        ((code, _),) = kept
        beside = torch.cat((code, t.unsqueeze(1)), dim=1).unsqueeze(1).expand(-1, x.shape[1], -1)
        found: Tensor = self.field(torch.cat((x, beside), dim=2))
        return found

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        kept, present, _ = self.flow_prefix(batch)
        x = torch.randn(len(present), self.config.chunk_size, self.entries, device=present.device)
        for i in range(self.config.num_steps):
            t = torch.full((len(x),), 1.0 - i / self.config.num_steps, device=x.device)
            x = x - self.flow_velocity(kept, present, x, t) / self.config.num_steps
        return x

    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        return self.predict_action_chunk(batch)[:, 0]

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
        raise NotImplementedError

    def get_optim_params(self) -> Any:
        return self.parameters()

    def reset(self) -> None:
        pass
