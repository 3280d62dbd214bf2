"""The value of an OpenVLA-OFT policy: RLinf's value head, and the inputs that this project adds to it."""

from __future__ import annotations

from torch import Tensor, nn

from polyrhythm.plugins.pretrained.precision import in_float32

_HIDDEN = (512, 128)


class ValueHead(nn.Module):
    """An MLP in float32 on the hidden state of the prompt's last token.

    `mlp` has the names and shapes of RLinf's value head, whose golden values the parity tests compare. `seen` adds the
    normalised state and the episode's progress to its first layer; it begins at zero. actions: number of values, one
    per action (RLinf's value_type: action_level); None for one in all.
    """

    def __init__(self, width: int, seen: int, actions: int | None = None) -> None:
        super().__init__()
        first, second = _HIDDEN
        self.mlp = nn.Sequential(
            nn.Linear(width, first),
            nn.GELU(),
            nn.Linear(first, second),
            nn.GELU(),
            nn.Linear(second, actions or 1, bias=False),
        )
        self._per_action = actions is not None
        self.seen = nn.Linear(seen, first, bias=False)
        nn.init.zeros_(self.seen.weight)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Hidden state [B,width] of any dtype, seen [B,entries] -> value [B] or [B,actions] float32."""
        with in_float32(hidden.device):
            first = self.mlp[0](hidden.float()) + self.seen(seen.float())
            value: Tensor = self.mlp[1:](first)
        return value if self._per_action else value.squeeze(-1)
