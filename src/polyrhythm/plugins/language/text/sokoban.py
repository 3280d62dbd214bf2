"""Sokoban as a conversation: each message is a move, and the reply is the room after it.

Rooms are generated backwards: boxes start on their goals, and the player pulls them away at random. The reversed moves
solve the room, so every room is solvable and its solution is known without a search.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.base import MOVES, Count, TextSettings, draw_apart, last_move
from polyrhythm.plugins.language.text.conversation import Reply

#: Moves backwards for each box.
_MOVES_BACK = 24
#: Probability of pulling where a box can be pulled.
_PULLS = 0.7
#: Rooms that are tried before the settings are said to allow none.
_ROOMS = 500
#: Positions that the teacher looks at after a move that was not its own.
_SEARCHED = 20_000

Place = tuple[int, int]


class SokobanSettings(TextSettings):
    """A room of `size` x `size` fields, drawn from the seed: `#` wall, `-` floor, `.` goal, `$` box, `*` box on a goal,
    `@` the player, `+` the player on a goal.

    The last of the words left, down, right and up in a message is the move; it pushes a box that is in the way if the
    field behind is free, and otherwise moves nobody. The reply is the room after it. Reward 1 when all boxes are on
    goals, 0 otherwise. A box in a corner does not end the episode.
    """

    type: Literal["sokoban"] = "sokoban"
    size: Annotated[int, Field(ge=5, le=16)] = 6
    """Fields of an edge, walls around included."""
    boxes: Annotated[int, Field(ge=1, le=8)] = 1
    """Boxes, and goals."""
    walls: Annotated[float, Field(ge=0, le=0.4)] = 0.15
    """Probability that a field inside is a wall."""
    shortest: Count = 2
    """Fewest moves of the solution that a room was made with; a shorter one may exist."""
    max_turns: Count = 24
    """Most moves of an episode; no room needs more."""
    max_new_tokens: Count = 16
    """Most tokens of a message; longer ones are cut, which ends the episode."""
    max_prompt_tokens: Count = 1280
    """Most tokens before a message: all rooms and messages so far."""

    traits: ClassVar = replace(TextSettings.traits, expert=True)
    alphabet: ClassVar = "#-.$*@+\nabcdefghijklmnopqrstuvwxyz "
    stops: ClassVar = ("\n",)

    @model_validator(mode="after")
    def _in_order(self) -> SokobanSettings:
        if self.shortest > self.max_turns:
            raise ValueError(f"shortest = {self.shortest}: it is more than max_turns ({self.max_turns}); lower it")
        return self

    def conversation(self) -> Sokoban:
        return Sokoban(self)


class Position(NamedTuple):
    """The variable part of a room: the player and the boxes."""

    player: Place
    boxes: frozenset[Place]


class Room(NamedTuple):
    """An initial room. floor: fields without walls; solution: moves that solve it."""

    prompt: str
    size: int
    floor: frozenset[Place]
    goals: frozenset[Place]
    position: Position
    solution: tuple[str, ...]

    def shown(self, position: Position) -> str:
        """The room as text, one line per row."""
        lines = []
        for row in range(self.size):
            places = [(row, column) for column in range(self.size)]
            lines.append("".join(self._character(place, position) for place in places))
        return "".join(f"{line}\n" for line in lines)

    def _character(self, place: Place, position: Position) -> str:
        if place not in self.floor:
            return "#"
        goal = place in self.goals
        if place == position.player:
            return "+" if goal else "@"
        if place in position.boxes:
            return "*" if goal else "$"
        return "." if goal else "-"


class Sokoban:
    def __init__(self, settings: SokobanSettings) -> None:
        self._settings = settings

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        return self.enter(draw_apart(seed, lambda random: draw_room(random, self._settings)))

    def enter(self, room: Room) -> str:
        """Begin in this room."""
        self._room, self._position = room, room.position
        self._plan = deque(room.solution)
        return room.prompt

    def reply(self, message: str) -> Reply:
        move = last_move(message)
        if move is not None:
            self._position = moved(self._room.floor, self._position, MOVES[move])
            self._plan = deque(list(self._plan)[1:]) if self._plan and move == self._plan[0] else deque()
        solved = self._position.boxes == self._room.goals
        return Reply("" if solved else self._room.shown(self._position), float(solved), solved, solved)

    def expert(self) -> str:
        """The next move of the known solution; after a deviation, of one found by search, if any."""
        if not self._plan:
            self._plan = deque(search(self._room, self._position))
        return f"{self._plan[0] if self._plan else 'up'}\n"


def moved(floor: frozenset[Place], position: Position, step: Place) -> Position:
    """The position after a move; unchanged if a wall or an immovable box is in the way."""
    player = _beside(position.player, step)
    if player not in floor:
        return position
    if player not in position.boxes:
        return Position(player, position.boxes)
    pushed = _beside(player, step)
    if pushed not in floor or pushed in position.boxes:
        return position
    return Position(player, position.boxes - {player} | {pushed})


def search(room: Room, position: Position) -> list[str]:
    """Moves of a shortest solution; [] if none is found within the search limit."""
    found: dict[Position, tuple[Position, str] | None] = {position: None}
    waiting = deque([position])
    while waiting and len(found) < _SEARCHED:
        last = waiting.popleft()
        if last.boxes == room.goals:
            moves: list[str] = []
            while (before := found[last]) is not None:
                last, word = before
                moves.insert(0, word)
            return moves
        for word, step in MOVES.items():
            after = moved(room.floor, last, step)
            if after not in found:
                found[after] = last, word
                waiting.append(after)
    return []


def draw_room(random: Random, settings: SokobanSettings) -> Room:
    """Draw a room that can be solved within `max_turns`. ConfigError: none was found."""
    inside = [(row, column) for row in range(1, settings.size - 1) for column in range(1, settings.size - 1)]
    for _ in range(_ROOMS):
        floor = frozenset(place for place in inside if random.random() >= settings.walls)
        if len(floor) < 2 * settings.boxes + 1:
            continue
        *goals, player = random.sample(sorted(floor), settings.boxes + 1)
        moves = _played_back(random, floor, Position(player, frozenset(goals)))
        solution = tuple(word for _, word in reversed(moves[1:]))
        start = moves[-1][0]
        if settings.shortest <= len(solution) <= settings.max_turns and not start.boxes & frozenset(goals):
            room = Room("", settings.size, floor, frozenset(goals), start, solution)
            return room._replace(prompt=room.shown(start))
    raise ConfigError(
        f"env.boxes = {settings.boxes}: no room of {_ROOMS} has so many boxes off their goals and a solution of "
        f"{settings.shortest} to {settings.max_turns} moves; raise env.size or env.max_turns, or lower env.walls"
    )


def _played_back(random: Random, floor: frozenset[Place], solved: Position) -> list[tuple[Position, str]]:
    """Positions reached backwards from the solved one, without repetition, each with the move that undoes its last
    step."""
    way: list[tuple[Position, str]] = [(solved, "")]
    for _ in range(_MOVES_BACK * len(solved.boxes)):
        player, boxes = way[-1][0]
        choices = []
        for word, (down, right) in MOVES.items():
            back = _beside(player, (-down, -right))
            if back in floor and back not in boxes:
                choices.append((Position(back, boxes), word))
                if (box := _beside(player, (down, right))) in boxes:
                    choices.append((Position(back, boxes - {box} | {player}), word))
        if not choices:
            break
        pulls = [choice for choice in choices if choice[0].boxes != boxes]
        position, word = random.choice(pulls if pulls and random.random() < _PULLS else choices)
        if position.boxes == solved.boxes:  # the room would be solved already
            way = [(position, "")]
            continue
        for i, (earlier, _) in enumerate(way):
            if earlier == position:  # a loop
                del way[i + 1 :]
                break
        else:
            way.append((position, word))
    return way


def _beside(place: Place, step: Place) -> Place:
    return place[0] + step[0], place[1] + step[1]
