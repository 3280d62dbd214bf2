"""Proposals of Optuna's tree-structured Parzen estimator (the extra `optuna`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from polyrhythm.errors import MissingError, install_command
from polyrhythm.plugins.sweep.runs import SweepJournal
from polyrhythm.plugins.sweep.space import Combination, SweptSetting


def check_installed() -> None:
    """MissingError: Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise MissingError(f"--optuna: it needs the package optuna; run {install_command('optuna')}")


class Proposals:
    """A study in memory. The journal keeps what was proposed: asked again, it proposes the same and then goes on."""

    def __init__(self, settings: Sequence[SweptSetting], seed: int, journal: SweepJournal) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings, self._journal = settings, journal
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._fail = optuna.trial.TrialState.FAIL
        self._space = {one.path: _distribution(one) for one in settings}
        self._asked = 0

    def propose(self) -> Combination:
        known = self._journal.proposed
        if self._asked < len(known):
            values = {one.path: _value(one, known[self._asked][one.path]) for one in self._settings}
            self._study.enqueue_trial(values)
        params = self._study.ask(self._space).params
        combination = {
            one.path: one.text(params[one.path]) if one.is_range else params[one.path] for one in self._settings
        }
        self._asked += 1
        if self._asked > len(known):
            known.append(combination)
            self._journal.write()
        return known[self._asked - 1]

    def report(self, number: int, value: float | None) -> None:
        if value is None:
            self._study.tell(number, state=self._fail)
        else:
            self._study.tell(number, value)


def _distribution(setting: SweptSetting) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not setting.is_range:
        return CategoricalDistribution(setting.values)
    if setting.whole:
        return IntDistribution(int(setting.low), int(setting.high), log=setting.log)
    return FloatDistribution(setting.low, setting.high, log=setting.log)


def _value(setting: SweptSetting, text: str) -> str | int | float:
    if not setting.is_range:
        return text
    return int(text) if setting.whole else float(text)
