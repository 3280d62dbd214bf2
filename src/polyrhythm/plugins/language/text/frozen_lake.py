"""Gymnasium's FrozenLake as a conversation: each message is a move, and the reply the lake after it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from polyrhythm.plugins.language.text.base import MOVES, Count, TextSettings, draw_apart, last_move
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.specs.hashing import library_seed


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

    alphabet: ClassVar = "FHGP\nabcdefghijklmnopqrstuvwxyz "
    stops: ClassVar = ("\n",)

    def conversation(self) -> FrozenLake:
        return FrozenLake(self)


class _Lake(NamedTuple):
    prompt: str
    fields: list[str]


class FrozenLake:
    def __init__(self, settings: FrozenLakeSettings) -> None:
        self._settings = settings
        self._fields: list[str] = []
        self._place = (0, 0)
        self._env: Any = None

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        import gymnasium

        self.close()
        found: _Lake = draw_apart(seed, self._draw)
        self._fields, self._place = found.fields, (0, 0)
        slippery, most = self._settings.slippery, self._settings.max_turns
        env = gymnasium.make("FrozenLake-v1", desc=self._fields, is_slippery=slippery, max_episode_steps=most)
        self._env = env.unwrapped
        self._env.reset(seed=library_seed(seed))
        return found.prompt

    def _draw(self, random: Random) -> _Lake:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        settings = self._settings
        fields = generate_random_map(size=settings.size, p=settings.frozen, seed=random.randrange(2**31))
        return _Lake(_shown(fields, (0, 0)), fields)

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
        ways: deque[tuple[tuple[int, int], str]] = deque([(self._place, "")])
        seen = {self._place}
        while ways:
            (row, column), first = ways.popleft()
            if self._fields[row][column] == "G":
                return f"{first}\n"
            for word, (down, right) in MOVES.items():
                place = row + down, column + right
                inside = all(0 <= x < self._settings.size for x in place)
                if inside and place not in seen and self._fields[place[0]][place[1]] != "H":
                    seen.add(place)
                    ways.append((place, first or word))
        return "left\n"

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _shown(fields: list[str], place: tuple[int, int]) -> str:
    """The lake as text, one line per row; the start looks like any frozen field."""
    rows = [list(row.replace("S", "F")) for row in fields]
    rows[place[0]][place[1]] = "P"
    return "".join(f"{''.join(row)}\n" for row in rows)
