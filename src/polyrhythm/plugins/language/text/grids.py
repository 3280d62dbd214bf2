"""Gymnasium's FrozenLake and Sokoban as conversations: each message is a move, and the reply what is there after it.

Rooms of Sokoban are generated backwards: boxes start on their goals, and the player pulls them away at random. The
reversed moves solve the room, so every room is solvable and its solution is known without a search.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.base import Count, TextSettings, draw_apart
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.specs.hashing import library_seed

Place = tuple[int, int]
_State = TypeVar("_State")

#: Moves by Gymnasium's number, with rows and columns.
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_MOVE = re.compile("|".join(MOVES))
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
#: Moves backwards for each box.
_MOVES_BACK = 24
#: Probability of pulling where a box can be pulled.
_PULLS = 0.7
#: Rooms that are tried before the settings are said to allow none.
_ROOMS = 500
#: Positions that the teacher looks at after a move that was not its own.
_SEARCHED = 20_000


def last_move(message: str) -> str | None:
    """The last of the words left, down, right and up in a message; None if there is none."""
    found = _MOVE.findall(message)
    return found[-1] if found else None


def beside(place: Place, step: Place) -> Place:
    return place[0] + step[0], place[1] + step[1]


def shortest(
    start: _State, moved: Callable[[_State, Place], _State], solved: Callable[[_State], bool], most: int
) -> list[str]:
    """Moves of a shortest way to a solved state among the `most` nearest; [] if none. moved: the state after a step."""
    found: dict[_State, tuple[_State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting and len(found) < most:
        last = waiting.popleft()
        if solved(last):
            moves: list[str] = []
            while (before := found[last]) is not None:
                last, word = before
                moves.insert(0, word)
            return moves
        for word, step in MOVES.items():
            after = moved(last, step)
            if after not in found:
                found[after] = last, word
                waiting.append(after)
    return []


class FrozenLakeSettings(TextSettings):
    """A lake of `size` x `size` fields, drawn from the seed: `F` frozen, `H` a hole, `G` the goal, `P` the player.

    The last of the words left, down, right and up in a message is the move; a message without one moves nobody. The
    reply is the lake after it. Reward 1 at the goal, 0 otherwise; a hole ends the episode.
    """

    traits: ClassVar = replace(TextSettings.traits, expert=True)
    needs: ClassVar = ("gymnasium",)

    type: Literal["frozen_lake"] = "frozen_lake"
    size: Annotated[int, Field(ge=3, le=16)] = 4
    """Fields of an edge."""
    frozen: Annotated[float, Field(ge=0.5, le=0.95)] = 0.8
    """Probability that a field is no hole; there is always a way."""
    slippery: bool = False
    """Whether two of three moves go to one side of where they were meant to."""
    max_turns: Count = 16
    """Most moves of an episode."""
    max_new_tokens: Count = 16
    """Most tokens of a message; longer ones are cut, which ends the episode."""
    max_prompt_tokens: Count = 640
    """Most tokens before a message: all lakes and messages so far."""

    alphabet: ClassVar = "FHGP\n" + _LETTERS
    stops: ClassVar = ("\n",)

    def conversation(self) -> FrozenLake:
        return FrozenLake(self)


class FrozenLake:
    def __init__(self, settings: FrozenLakeSettings) -> None:
        self._settings = settings
        self._fields: list[str] = []
        self._place = (0, 0)
        self._env: Any = None

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        self.close()
        size, frozen, most = self._settings.size, self._settings.frozen, self._settings.max_turns

        def draw(random: Random) -> list[str]:
            fields: list[str] = generate_random_map(size=size, p=frozen, seed=random.randrange(2**31))
            return fields

        self._fields, self._place = draw_apart(seed, draw, lambda fields: _shown(fields, (0, 0))), (0, 0)
        slippery = self._settings.slippery
        env = gymnasium.make("FrozenLake-v1", desc=self._fields, is_slippery=slippery, max_episode_steps=most)
        self._env = env.unwrapped
        self._env.reset(seed=library_seed(seed))
        return _shown(self._fields, self._place)

    def reply(self, message: str) -> Reply:
        move = last_move(message)
        if move is None:
            return Reply(_shown(self._fields, self._place), done=False)
        state, reward, done, *_ = self._env.step(list(MOVES).index(move))
        self._place = divmod(int(state), self._settings.size)
        won = float(reward) > 0
        return Reply("" if done else _shown(self._fields, self._place), float(won), bool(done), won)

    def expert(self) -> str:
        """The first move of a shortest path to the goal."""
        fields = {(row, i): field for row, line in enumerate(self._fields) for i, field in enumerate(line)}

        def moved(place: Place, step: Place) -> Place:
            after = beside(place, step)
            return place if fields.get(after, "H") == "H" else after

        return f"{(shortest(self._place, moved, lambda at: fields[at] == 'G', len(fields) + 1) or ['left'])[0]}\n"

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _shown(fields: Sequence[str], place: Place) -> str:
    """The lake as text, one line per row; the start looks like any frozen field."""
    rows = [list(row.replace("S", "F")) for row in fields]
    rows[place[0]][place[1]] = "P"
    return "".join(f"{''.join(row)}\n" for row in rows)


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
    alphabet: ClassVar = "#-.$*@+\n" + _LETTERS
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

    size: int
    floor: frozenset[Place]
    goals: frozenset[Place]
    position: Position
    solution: tuple[str, ...]

    def shown(self, position: Position) -> str:
        rows = range(self.size)
        return "".join("".join(self._character((row, column), position) for column in rows) + "\n" for row in rows)

    def _character(self, place: Place, position: Position) -> str:
        if place not in self.floor:
            return "#"
        kind = 0 if place == position.player else 1 if place in position.boxes else 2
        return ("+*." if place in self.goals else "@$-")[kind]


class Sokoban:
    def __init__(self, settings: SokobanSettings) -> None:
        self._settings = settings

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        made: Callable[[Random], Room] = partial(draw_room, settings=self._settings)
        return self.enter(draw_apart(seed, made, lambda room: room.shown(room.position)))

    def enter(self, room: Room) -> str:
        """Begin in this room."""
        self._room, self._position = room, room.position
        self._plan = deque(room.solution)
        return room.shown(room.position)

    def reply(self, message: str) -> Reply:
        move = last_move(message)
        if move is not None:
            self._position = moved(self._room.floor, self._position, MOVES[move])
            followed = self._plan and self._plan.popleft() == move
            self._plan = self._plan if followed else deque()
        solved = self._position.boxes == self._room.goals
        return Reply("" if solved else self._room.shown(self._position), float(solved), solved, solved)

    def expert(self) -> str:
        """The next move of the known solution; after a deviation, of one found by search, if any."""
        if not self._plan:
            floor, goals = self._room.floor, self._room.goals
            ways = shortest(self._position, partial(moved, floor), lambda at: at.boxes == goals, _SEARCHED)
            self._plan = deque(ways)
        return f"{self._plan[0] if self._plan else 'up'}\n"


def moved(floor: frozenset[Place], position: Position, step: Place) -> Position:
    """The position after a move; unchanged if a wall or an immovable box is in the way."""
    player = beside(position.player, step)
    if player not in floor:
        return position
    if player not in position.boxes:
        return Position(player, position.boxes)
    pushed = beside(player, step)
    if pushed not in floor or pushed in position.boxes:
        return position
    return Position(player, position.boxes - {player} | {pushed})


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
            return Room(settings.size, floor, frozenset(goals), start, solution)
    raise ConfigError(
        f"env.boxes = {settings.boxes}: no room of {_ROOMS} has so many boxes off their goals and a solution of "
        f"{settings.shortest} to {settings.max_turns} moves; raise env.size or env.max_turns, or lower env.walls"
    )


def _played_back(random: Random, floor: frozenset[Place], solved: Position) -> list[tuple[Position, str]]:
    """Positions reached backwards from the solved one, without loops, each with the move that undoes its last step."""
    way: list[tuple[Position, str]] = [(solved, "")]
    for _ in range(_MOVES_BACK * len(solved.boxes)):
        player, boxes = way[-1][0]
        choices = []
        for word, (down, right) in MOVES.items():
            back = beside(player, (-down, -right))
            if back in floor and back not in boxes:
                choices.append((Position(back, boxes), word))
                if (box := beside(player, (down, right))) in boxes:
                    choices.append((Position(back, boxes - {box} | {player}), word))
        if not choices:
            break
        pulls = [choice for choice in choices if choice[0].boxes != boxes]
        position, word = random.choice(pulls if pulls and random.random() < _PULLS else choices)
        known = [earlier for earlier, _ in way]
        if position.boxes == solved.boxes:  # the room would be solved already
            way = [(position, "")]
        elif position in known:  # a loop
            del way[known.index(position) + 1 :]
        else:
            way.append((position, word))
    return way
