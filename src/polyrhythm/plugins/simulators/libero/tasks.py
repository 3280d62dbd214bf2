"""LIBERO's suites: names, instructions, also in other words, and the published step limit of each task.

Needs no simulator.

A task's name is that of its files in LIBERO: its scene, if the suite has several, and the words of its instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: Fixed initial states of every task.
INITIAL_STATES = 50
#: Suite -> env steps of an episode in the papers' evaluations, without those in which objects come to rest.
STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
#: Where the bowl lies.
_PLACES = (
    "between the plate and the ramekin",
    "next to the ramekin",
    "from table center",
    "on the cookie box",
    "in the top drawer of the wooden cabinet",
    "on the ramekin",
    "next to the cookie box",
    "on the stove",
    "next to the plate",
    "on the wooden cabinet",
)
_GROCERIES = (
    "alphabet soup",
    "cream cheese",
    "salad dressing",
    "bbq sauce",
    "ketchup",
    "tomato sauce",
    "butter",
    "milk",
    "chocolate pudding",
    "orange juice",
)
_GOALS = (
    "open the middle drawer of the cabinet",
    "put the bowl on the stove",
    "put the wine bottle on top of the cabinet",
    "open the top drawer and put the bowl inside",
    "put the bowl on top of the cabinet",
    "push the plate to the front of the stove",
    "put the cream cheese in the bowl",
    "turn on the stove",
    "put the bowl on the plate",
    "put the wine bottle on the rack",
)
#: Scene -> instructions.
_LIBERO_10 = {
    "LIVING_ROOM_SCENE2": (
        "put both the alphabet soup and the tomato sauce in the basket",
        "put both the cream cheese box and the butter in the basket",
    ),
    "KITCHEN_SCENE3": ("turn on the stove and put the moka pot on it",),
    "KITCHEN_SCENE4": ("put the black bowl in the bottom drawer of the cabinet and close it",),
    "LIVING_ROOM_SCENE5": ("put the white mug on the left plate and put the yellow and white mug on the right plate",),
    "STUDY_SCENE1": ("pick up the book and place it in the back compartment of the caddy",),
    "LIVING_ROOM_SCENE6": ("put the white mug on the plate and put the chocolate pudding to the right of the plate",),
    "LIVING_ROOM_SCENE1": ("put both the alphabet soup and the cream cheese box in the basket",),
    "KITCHEN_SCENE8": ("put both moka pots on the stove",),
    "KITCHEN_SCENE6": ("put the yellow and white mug in the microwave and close it",),
}
_LIBERO_90 = {
    "KITCHEN_SCENE10": (
        "close the top drawer of the cabinet",
        "close the top drawer of the cabinet and put the black bowl on top of it",
        "put the black bowl in the top drawer of the cabinet",
        "put the butter at the back in the top drawer of the cabinet and close it",
        "put the butter at the front in the top drawer of the cabinet and close it",
        "put the chocolate pudding in the top drawer of the cabinet and close it",
    ),
    "KITCHEN_SCENE1": (
        "open the bottom drawer of the cabinet",
        "open the top drawer of the cabinet",
        "open the top drawer of the cabinet and put the bowl in it",
        "put the black bowl on the plate",
        "put the black bowl on top of the cabinet",
    ),
    "KITCHEN_SCENE2": (
        "open the top drawer of the cabinet",
        "put the black bowl at the back on the plate",
        "put the black bowl at the front on the plate",
        "put the middle black bowl on the plate",
        "put the middle black bowl on top of the cabinet",
        "stack the black bowl at the front on the black bowl in the middle",
        "stack the middle black bowl on the back black bowl",
    ),
    "KITCHEN_SCENE3": (
        "put the frying pan on the stove",
        "put the moka pot on the stove",
        "turn on the stove",
        "turn on the stove and put the frying pan on it",
    ),
    "KITCHEN_SCENE4": (
        "close the bottom drawer of the cabinet",
        "close the bottom drawer of the cabinet and open the top drawer",
        "put the black bowl in the bottom drawer of the cabinet",
        "put the black bowl on top of the cabinet",
        "put the wine bottle in the bottom drawer of the cabinet",
        "put the wine bottle on the wine rack",
    ),
    "KITCHEN_SCENE5": (
        "close the top drawer of the cabinet",
        "put the black bowl in the top drawer of the cabinet",
        "put the black bowl on the plate",
        "put the black bowl on top of the cabinet",
        "put the ketchup in the top drawer of the cabinet",
    ),
    "KITCHEN_SCENE6": (
        "close the microwave",
        "put the yellow and white mug to the front of the white mug",
    ),
    "KITCHEN_SCENE7": (
        "open the microwave",
        "put the white bowl on the plate",
        "put the white bowl to the right of the plate",
    ),
    "KITCHEN_SCENE8": (
        "put the right moka pot on the stove",
        "turn off the stove",
    ),
    "KITCHEN_SCENE9": (
        "put the frying pan on the cabinet shelf",
        "put the frying pan on top of the cabinet",
        "put the frying pan under the cabinet shelf",
        "put the white bowl on top of the cabinet",
        "turn on the stove",
        "turn on the stove and put the frying pan on it",
    ),
    "LIVING_ROOM_SCENE1": (
        "pick up the alphabet soup and put it in the basket",
        "pick up the cream cheese box and put it in the basket",
        "pick up the ketchup and put it in the basket",
        "pick up the tomato sauce and put it in the basket",
    ),
    "LIVING_ROOM_SCENE2": (
        "pick up the alphabet soup and put it in the basket",
        "pick up the butter and put it in the basket",
        "pick up the milk and put it in the basket",
        "pick up the orange juice and put it in the basket",
        "pick up the tomato sauce and put it in the basket",
    ),
    "LIVING_ROOM_SCENE3": (
        "pick up the alphabet soup and put it in the tray",
        "pick up the butter and put it in the tray",
        "pick up the cream cheese and put it in the tray",
        "pick up the ketchup and put it in the tray",
        "pick up the tomato sauce and put it in the tray",
    ),
    "LIVING_ROOM_SCENE4": (
        "pick up the black bowl on the left and put it in the tray",
        "pick up the chocolate pudding and put it in the tray",
        "pick up the salad dressing and put it in the tray",
        "stack the left bowl on the right bowl and place them in the tray",
        "stack the right bowl on the left bowl and place them in the tray",
    ),
    "LIVING_ROOM_SCENE5": (
        "put the red mug on the left plate",
        "put the red mug on the right plate",
        "put the white mug on the left plate",
        "put the yellow and white mug on the right plate",
    ),
    "LIVING_ROOM_SCENE6": (
        "put the chocolate pudding to the left of the plate",
        "put the chocolate pudding to the right of the plate",
        "put the red mug on the plate",
        "put the white mug on the plate",
    ),
    "STUDY_SCENE1": (
        "pick up the book and place it in the front compartment of the caddy",
        "pick up the book and place it in the left compartment of the caddy",
        "pick up the book and place it in the right compartment of the caddy",
        "pick up the yellow and white mug and place it to the right of the caddy",
    ),
    "STUDY_SCENE2": (
        "pick up the book and place it in the back compartment of the caddy",
        "pick up the book and place it in the front compartment of the caddy",
        "pick up the book and place it in the left compartment of the caddy",
        "pick up the book and place it in the right compartment of the caddy",
    ),
    "STUDY_SCENE3": (
        "pick up the book and place it in the front compartment of the caddy",
        "pick up the book and place it in the left compartment of the caddy",
        "pick up the book and place it in the right compartment of the caddy",
        "pick up the red mug and place it to the right of the caddy",
        "pick up the white mug and place it to the right of the caddy",
    ),
    "STUDY_SCENE4": (
        "pick up the book in the middle and place it on the cabinet shelf",
        "pick up the book on the left and place it on top of the shelf",
        "pick up the book on the right and place it on the cabinet shelf",
        "pick up the book on the right and place it under the cabinet shelf",
    ),
}


class LiberoTask(NamedTuple):
    name: str
    suite: str
    instruction: str

    @property
    def step_limit(self) -> int:
        """Env steps of an episode in the papers' evaluations."""
        return STEP_LIMITS[self.suite]


def _tasks() -> Iterator[LiberoTask]:
    suites: dict[str, Mapping[str, tuple[str, ...]]] = {
        "libero_spatial": {"": tuple(f"pick up the black bowl {place} and place it on the plate" for place in _PLACES)},
        "libero_object": {"": tuple(f"pick up the {thing} and place it in the basket" for thing in _GROCERIES)},
        "libero_goal": {"": _GOALS},
        "libero_10": _LIBERO_10,
        "libero_90": _LIBERO_90,
    }
    for suite, scenes in suites.items():
        for scene, instructions in scenes.items():
            for instruction in instructions:
                yield LiberoTask("_".join([*filter(None, [scene]), *instruction.split()]), suite, instruction)


#: Name -> task; names are different in all suites.
TASKS = {task.name: task for task in _tasks()}
#: Suite -> names of its tasks.
SUITES = {suite: tuple(name for name, task in TASKS.items() if task.suite == suite) for suite in STEP_LIMITS}
INSTRUCTIONS = {name: task.instruction for name, task in TASKS.items()}


#: LIBERO's words → others with the same meaning, the longest first where one begins with another.
_WORDS = {
    "pick up": "grab",
    "turn on": "switch on",
    "turn off": "switch off",
    "on top of": "onto the top of",
    "to the front of": "to the near side of",
    "place": "set",
    "put": "move",
    "open": "pull open",
    "close": "shut",
    "push": "slide",
    "stack": "pile",
    "basket": "hamper",
    "tray": "platter",
    "bowl": "dish",
    "mug": "cup",
    "stove": "cooker",
    "cabinet": "cupboard",
    "frying pan": "skillet",
    "caddy": "organizer",
}
_PATTERN = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")


def in_other_words(instruction: str) -> str:
    """A paraphrase with other verbs and nouns: "open the top drawer of the cabinet" becomes "pull open the top
    drawer of the cupboard"."""
    return _PATTERN.sub(lambda found: _WORDS[found[0]], instruction)
