"""Updates of a policy by reinforcement learning, on one rank or several: trajectories in, new weights and metrics out.

Invariants (tests/training/test_learner.py): the gradient of an optimizer step does not depend on the micro-batch size;
an update is a function of the weights, the optimizer's state, the trajectories, the seed and the update's index alone;
masked entries have no effect; a gradient that is not finite changes neither weights nor optimizer. The number of ranks
(tests/plugins/ranks/test_ranks.py) and the parts in which samples come (tests/training/test_streamed_updates.py) change
nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import published_state
from polyrhythm.specs import Trajectory
from polyrhythm.training import optim
from polyrhythm.training.batch import all_of_version
from polyrhythm.training.checkpoint import Saved, Saving, load
from polyrhythm.training.micro_batches import MicroBatchLimits
from polyrhythm.training.moments import UpdateStatistics
from polyrhythm.training.nonfinite import SkippedSteps
from polyrhythm.training.objective import MicroStep, Objective
from polyrhythm.training.parts import SampleFeed
from polyrhythm.training.ranks import ONE_RANK, Ranks
from polyrhythm.training.reference import Reference, load_weights, make_reference, room_for_copy
from polyrhythm.training.steps import Steps
from polyrhythm.training.update import Update

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings
    from polyrhythm.config.sections.learning import TrainingSettings


class Learner:
    """A policy and its optimizer; the policy stays on its device, or is sharded on that of its rank.

    total_updates: length of the learning-rate schedule (versions × sync_interval). seed: of the shuffles.
    sync_interval: updates of a version. If `algorithm.kl` needs a reference policy, it is the policy at the start of
    the first update (`training.reference`). halt: why the run must stop after the last update; "" if it need not.
    phase_seconds: of the last update, by phase (`PhaseTimes`). token_versions: if weights change within a message, the
    log-prob of each token is that of its own weights, which keep nothing of older ones.

    ranks: the processes that train one policy, each with a learner of the same arguments. All of them call every
    method, with the same arguments and in the same order.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        *,
        total_updates: int,
        seed: int,
        ranks: Ranks = ONE_RANK,
        token_versions: bool = False,
        sync_interval: int = 1,
    ) -> None:
        self.policy, self.ranks = policy, ranks
        self.token_versions, self.sync_interval = token_versions, sync_interval
        self.updates = 0
        self.halt = ""
        self.phase_seconds: dict[str, float] = {}
        self.skipped = SkippedSteps(training)
        self.statistics = UpdateStatistics(as_module(policy), algorithm, ranks.total)
        self.reference: Reference | None = None
        self._saving: Saving = Saved()
        self.algorithm, self.training = algorithm, training
        self.total_updates, self.seed = total_updates, seed
        self.module = as_module(policy)
        self.device = ranks.device or next(p.device for p in self.module.parameters() if p.requires_grad)
        self.objective = Objective(algorithm)
        self.limits = MicroBatchLimits(policy, training.micro_batch_steps, training.micro_batch_tokens)
        self._room = room_for_copy(policy) if algorithm.kl.coef and ranks.divides else None
        self.micro_step = ranks.wrap(MicroStep(policy, self.objective))
        if self._room is not None:
            ranks.shard(as_module(self._room))
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optim.adamw_of(self.module, training.optimizer, ranks)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        update_index: int,
        *,
        version: int = 0,
        own_weights: bool = False,
        own_version: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """All epochs over `trajectories`: one optimizer step per `next()`, metrics as the generator's return value.

        With `training.require_batches` above 1 the trajectories are mini-batches of `mini_batch_samples`, in order: an
        optimizer step has chunk steps of only one of them; targets are computed over the whole update. The first
        `next()` also collates (afterwards the trajectories' memory is no longer read) and prepares targets. Each rank
        reads its own trajectories, and only lengths and groups of the others.

        The learning rate, the shuffles and the critic's warm-up follow update_index (from 0). version: the one that the
        update belongs to, the trainer's present one + 1; interpolated proximal log-probs also count its earlier updates
        (after a trainer was lost, off by less than a version). Metrics are means over the optimizer steps that were not
        skipped (interpolation_error: of the first step, if the recomputed proximal policy is the trained one).

        own_weights: the update's initial weights made all trajectories; then mismatch_kl is the divergence of the
        log-probs of the first optimizer step from those of the generators, 0 but for rounding (absent if the statistics
        of observations begin here: `UpdateStatistics`). own_version: version of the initial weights, if generators
        could have them: among samples of several versions, chunk steps made entirely by it are compared (tokens with
        `token_versions`), if log-probs are recomputed.

        before_step is called before the weights change, and before the update counts even if no step changed them.
        Closing the generator early leaves the weights of the last finished step and `updates` unchanged. A step whose
        gradient is not finite is skipped and the update completed; `halt` names the cause, unless
        training.on_nonfinite_gradient is skip.
        """
        update = Update(self, update_index, version, own_version, before_step)
        update.prepare(trajectories, own_weights=own_weights)
        return (yield from update.run())

    def update_in_parts(
        self,
        feed: SampleFeed,
        update_index: int,
        *,
        version: int = 0,
        own_version: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """`update` on samples that arrive in parts: equal weights but for rounding, on one rank.

        Supported where `config.streaming.why_whole_objective` has no objection. A `next()` while `feed` is empty does
        nothing; otherwise it processes all waiting samples and adds to the gradient, or takes one optimizer step. If
        the policy has no statistics of observations yet, training begins only with the last sample.
        """
        update = Update(self, update_index, version, own_version, before_step)
        if self.statistics.are_empty:
            while not feed.complete:
                feed.starved = True
                yield
            update.times.skip()
            samples = feed.take()
            update.prepare(samples, own_weights=all_of_version(samples, own_version))
        else:
            yield from update.prepare_parts(feed)
        return (yield from update.run())

    def reference_policy(self) -> Reference | None:
        """The reference policy of the KL term, made on first use; None without that term."""
        if self.algorithm.kl.coef and self.reference is None:
            self.reference = make_reference(self.policy, self.ranks, room=self._room)
        return self.reference

    def publishable(self) -> Iterator[tuple[str, Tensor]]:
        """Whole published tensors by name, one at a time: with shard only the current one is whole."""
        yield from self.ranks.snapshot(published_state(self.module))

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replace the published part of the policy by whole tensors. ValueError: they are of another policy."""
        load_weights(self.module, state, self.ranks)

    def save(self, path: Path, *, background: bool = False) -> Saving:
        """Save the state: as a file written by rank 0, or with shard as a folder that all ranks write in the
        background.

        It is complete once the result's `wait` has returned on rank 0; an unfinished save is waited for first.
        background: write a file in the background too, so the learner may continue at once. OSError, also from `wait`:
        cannot write.
        """
        self._saving.wait()
        self._saving = Saved()
        self._saving = self.ranks.save(self.state_dict(), path, background=background)
        return self._saving

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, with any number of ranks. RunFolderError: it is damaged. ValueError: it
        is of another policy."""
        like = self.module.state_dict()  # tensors sharded as those of a state are
        moments = {"state": self.optimizer.moments_like()}
        self.load_state_dict(load(path, {"policy": like, "reference": like, "optimizer": moments}))

    def state_dict(self) -> dict[str, Any]:
        """Published part of the policy (all of most policies), optimizer, number of completed updates, and the
        reference policy if there is one. Tensors are live, not copies; with shard sharded."""
        state = {
            "policy": published_state(self.module),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            **self.statistics.state_dict(),
        }
        return state if self.reference is None else state | {"reference": self.reference.state_dict()}

    def kept_tensors(self) -> list[Tensor]:
        """All tensors kept between updates, on any device; of sharded ones this rank's parts. Drops gradients."""
        self.optimizer.zero_grad()
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        copied = self.reference or self._room
        reference = [] if copied is None else list(copied.state_dict().values())
        policy = (*self.module.parameters(), *self.module.buffers())
        return [*(self.ranks.part(x) for x in (*policy, *moments, *reference)), *self.ranks.buffers()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors may be whole or sharded. ValueError: it is of another policy."""
        load_weights(self.module, state["policy"], self.ranks)
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        self.statistics.load_state_dict(state)
        if "reference" in state:
            self.reference = make_reference(self.policy, self.ranks, state["reference"], self._room)
