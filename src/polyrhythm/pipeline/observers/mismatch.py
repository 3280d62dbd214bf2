"""Whether generators and trainer agree about the log-probs of the same weights, watched while a run trains.

The trial before the start compares two rows on this machine's CPU. What only a run shows is found here: a policy that
keeps state between calls, another device or precision, weights that did not arrive.
"""

from __future__ import annotations

import logging

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.policies.base import Policy
from polyrhythm.runtime.messages import Report

log = logging.getLogger(__name__)

#: Difference of log-probs that is allowed whatever the policy promises: batches of other sizes round otherwise.
_ROUNDING = 0.01
_METRIC = "train/actor/mismatch_kl"


def mismatch_limit(algorithm: AlgorithmSettings, policy: Policy) -> float:
    """The approximate KL divergence, d²/2, of log-probs that differ by d.

    d: the policy's tolerance for each of the entries that one log-prob sums, 0.01 at least.
    """
    summed = {"token": 1, "action": policy.action_dim, "chunk": policy.chunk * policy.action_dim}
    return max(_ROUNDING, policy.tolerance * summed[algorithm.logprob_level]) ** 2 / 2


class MismatchWarning(Observer):
    """Warns once, at the first update whose mismatch_kl is above the limit."""

    def __init__(self, limit: float) -> None:
        self._limit, self._warned = limit, False

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        found = report.values.get(_METRIC, 0.0)
        if self._warned or not found > self._limit:
            return
        self._warned = True
        log.warning(
            "%s = %.3g in update %d, the limit by the policy's tolerance is %.3g: generators and trainer compute other "
            "log-probs from the same weights and observations. Likely causes: act and evaluate are of different "
            "distributions, the policy keeps state between calls, or devices or precisions differ (then raise the "
            "policy's tolerance, or set algorithm.mismatch_cap); try polyrhythm check",
            _METRIC,
            found,
            report.step,
            self._limit,
        )
