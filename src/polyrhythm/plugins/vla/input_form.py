"""What each architecture reads and writes, as plain numbers: the policy's settings make an `InputForm` of its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["pi0", "pi05", "openvla_oft", "groot_n1d5"]

#: Names of the cameras of each architecture in the order of its inputs, for folders that do not name theirs.
CAMERAS = {
    "pi0": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "pi05": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "openvla_oft": ("primary", "left_wrist", "right_wrist"),
    "groot_n1d5": ("ego_view", "wrist", "third"),
}
#: GR00T's rows of its per-embodiment weights, by the tag of the statistics (NVIDIA; RLinf).
EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "genie1_gripper": 26,
    "libero_franka": 31,
    "isaaclab_franka": 31,
    "maniskill_widowx": 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForm:
    """The inputs and outputs of one network.

    image: side of its images in pixels. horizon: H; action_dim: entries of an action, padded. state_dim: entries of the
    state, padded; 0: as many as the environment has. needs_state: the network reads the state. vocabulary: ids lie
    below; words: hashed words do. length: places for the prompt; 0: as many as the longest prompt. fill: where short
    prompts are filled up: right, left, or inside (behind the first token). bos, pad, empty, image_token: ids.
    image_tokens: places of an image in the prompt (GR00T). state_in_prompt: π0.5's bins. crop: OpenVLA-OFT's 90% of the
    area. embodiments: GR00T's number of them.
    """

    architecture: Architecture
    image: int
    horizon: int
    action_dim: int
    vocabulary: int
    words: int = 0
    state_dim: int = 0
    needs_state: bool = True
    length: int = 0
    fill: Literal["right", "left", "inside"] = "right"
    bos: int = 2
    pad: int = 0
    empty: int = 0
    image_token: int = 0
    image_tokens: int = 0
    state_in_prompt: bool = False
    crop: bool = False
    embodiments: int = 0

    @property
    def pads(self) -> bool:
        """Whether the network's state and actions may have more entries than the robot's."""
        return self.architecture != "openvla_oft"

    def __post_init__(self) -> None:
        if not self.words:
            object.__setattr__(self, "words", self.vocabulary)
