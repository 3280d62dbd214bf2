"""Instructions of ManiSkill's tasks. Plain data, so that a configuration can be read without the simulator."""

from __future__ import annotations

import re

#: Task id → instruction of the policy. The first six need no assets besides those in ManiSkill's package; the last four
#: are bridge tasks, and have the sentences of their own code.
INSTRUCTIONS: dict[str, str] = {
    "PickCube-v1": "take the red cube and hold it at the goal",
    "PushCube-v1": "push the blue cube forward onto the round target",
    "StackCube-v1": "put the red cube on top of the green cube and let it go",
    "PullCube-v1": "pull the blue cube back onto the round target",
    "LiftPegUpright-v1": "stand the peg that lies on the table upright",
    "PegInsertionSide-v1": "take the peg and put its orange end into the hole in the box",
    "PokeCube-v1": "take the peg and poke the cube onto the round target with it",
    "PlaceSphere-v1": "put the ball into the bin",
    "RollBall-v1": "roll the ball onto the round target at the other end of the table",
    "PullCubeTool-v1": "pull the cube into reach with the tool",
    "StackPyramid-v1": "build a pyramid with the blue cube on top of the red and the green cube",
    "PlugCharger-v1": "take the charger and plug it into the socket",
    "PushT-v1": "push the T onto its outline",
    "PickSingleYCB-v1": "take the object and hold it at the goal",
    "TurnFaucet-v1": "turn the handle of the faucet",
    "OpenCabinetDrawer-v1": "pull the drawer open",
    "OpenCabinetDoor-v1": "pull the door of the cabinet open",
    "PutCarrotOnPlateInScene-v1": "put carrot on plate",
    "PutEggplantInBasketScene-v1": "put eggplant into yellow basket",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
}

#: The same tasks in other words, for an evaluation out of distribution.
OTHER_WORDS: dict[str, str] = {
    "PickCube-v1": "grasp the small cube and carry it to the target point",
    "PushCube-v1": "slide the cube ahead into the circle",
    "StackCube-v1": "place one cube on the other: red above green, then release",
    "PullCube-v1": "drag the cube towards you into the circle",
    "LiftPegUpright-v1": "raise the lying rod so that it is vertical",
    "PegInsertionSide-v1": "grab the rod and insert its orange tip in the opening of the block",
    "PokeCube-v1": "use the rod to nudge the block into the circle",
    "PlaceSphere-v1": "drop the sphere in the box",
    "RollBall-v1": "let the sphere roll across the table into the circle",
    "PullCubeTool-v1": "use the tool to bring the block closer",
    "StackPyramid-v1": "set two cubes side by side and put the blue one across them",
    "PlugCharger-v1": "grab the adapter and insert it in the outlet",
    "PushT-v1": "move the T shape until it covers its drawing",
    "PickSingleYCB-v1": "grasp the thing and carry it to the target point",
    "TurnFaucet-v1": "open the tap by its lever",
    "OpenCabinetDrawer-v1": "slide out the drawer",
    "OpenCabinetDoor-v1": "swing open the cupboard",
    "PutCarrotOnPlateInScene-v1": "set the orange vegetable down on the dish",
    "PutEggplantInBasketScene-v1": "drop the purple vegetable in the basket",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "place the green cube on top of the yellow one",
    "PutSpoonOnTableClothInScene-v1": "lay the spoon down on the cloth",
}


def other_words_of(task: str) -> str | None:
    """The task's instruction in other words; None for a task that is not listed."""
    return OTHER_WORDS.get(task.rpartition(":")[2])


def instruction_of(task: str, own: str = "") -> str:
    """The task's instruction; for a task that is not listed, what its code says, `own`, or else the words of its id:
    `RotateValveLevel0-v1` gives "rotate valve level 0". A module before the id, `module:ID`, is left out."""
    identifier = task.rpartition(":")[2]
    if known := INSTRUCTIONS.get(identifier) or own:
        return known
    name = re.sub(r"-v\d+$", "", identifier)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return " ".join(words).lower() or task
