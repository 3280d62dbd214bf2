"""The 50 Meta-World tasks: their instructions, and the goals that only a marker shows.

Plain data, so that a configuration can be checked and a policy built without the simulator.
"""

from __future__ import annotations

#: Task name → instruction of the policy.
INSTRUCTIONS: dict[str, str] = {
    "assembly-v3": "pick up the ring by its handle and put it over the peg",
    "basketball-v3": "drop the ball through the hoop",
    "bin-picking-v3": "move the cube from one bin into the other",
    "box-close-v3": "pick up the lid and put it on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button down from above",
    "button-press-v3": "push the button on the box",
    "button-press-wall-v3": "reach around the wall and push the button on the box",
    "coffee-button-v3": "push the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "slide the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door by turning its lock",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door by turning its lock back",
    "drawer-close-v3": "push the drawer shut",
    "drawer-open-v3": "pull the drawer open",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "take the hammer and drive the nail into the block",
    "hand-insert-v3": "put the gripper into the hole in the table",
    "handle-press-side-v3": "push the handle on the side down",
    "handle-press-v3": "push the handle down",
    "handle-pull-side-v3": "pull the handle on the side up",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "raise the lever until it stands upright",
    "peg-insert-side-v3": "push the peg sideways into the hole of the block",
    "peg-unplug-side-v3": "pull the peg sideways out of the block",
    "pick-out-of-hole-v3": "take the puck out of the hole and carry it to the marker",
    "pick-place-v3": "pick up the puck and carry it to the marker",
    "pick-place-wall-v3": "lift the puck over the wall and carry it to the marker",
    "plate-slide-back-side-v3": "drag the plate sideways out of the goal to the marker",
    "plate-slide-back-v3": "drag the plate back out of the goal to the marker",
    "plate-slide-side-v3": "slide the plate sideways into the goal",
    "plate-slide-v3": "slide the plate forward into the goal",
    "push-back-v3": "push the puck back to the marker",
    "push-v3": "push the puck to the marker",
    "push-wall-v3": "push the puck around the wall to the marker",
    "reach-v3": "move the gripper to the marker",
    "reach-wall-v3": "move the gripper around the wall to the marker",
    "shelf-place-v3": "pick up the cube and set it on the shelf",
    "soccer-v3": "push the ball into the goal",
    "stick-pull-v3": "hook the thermos with the stick and pull it to the marker",
    "stick-push-v3": "take the stick and push the thermos to the marker",
    "sweep-into-v3": "sweep the cube into the hole",
    "sweep-v3": "sweep the cube sideways off the table",
    "window-close-v3": "slide the window shut",
    "window-open-v3": "slide the window open",
}

#: Tasks whose goal is only a position → the site that marks it; cheap rendering keeps it visible.
GOAL_MARKERS: dict[str, str] = {
    "coffee-pull-v3": "mug_goal",
    "hand-insert-v3": "goal",
    "pick-out-of-hole-v3": "goal",
    "pick-place-v3": "goal",
    "pick-place-wall-v3": "goal",
    "plate-slide-back-side-v3": "goal",
    "plate-slide-back-v3": "goal",
    "plate-slide-side-v3": "goal",
    "push-back-v3": "goal",
    "push-v3": "goal",
    "push-wall-v3": "goal",
    "reach-v3": "goal",
    "reach-wall-v3": "goal",
    "stick-pull-v3": "goal",
    "stick-push-v3": "goal",
}

_MT10 = (
    *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
    *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
)
_MT25 = (
    *_MT10,
    *("coffee-pull-v3", "pick-out-of-hole-v3", "disassemble-v3", "pick-place-wall-v3", "basketball-v3"),
    *("stick-pull-v3", "button-press-wall-v3", "faucet-open-v3", "door-lock-v3", "lever-pull-v3", "sweep-into-v3"),
    *("faucet-close-v3", "coffee-button-v3", "button-press-topdown-wall-v3", "dial-turn-v3"),
)
#: Meta-World's sets of tasks, in its order; MT50 is all of them, in the order of their names.
TASK_SETS: dict[str, tuple[str, ...]] = {"MT10": _MT10, "MT25": _MT25, "MT50": tuple(sorted(INSTRUCTIONS))}
