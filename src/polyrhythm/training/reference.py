"""The reference policy of the KL term: the policy at the start of the first update.

A policy that shares its frozen tensors with its reference (trait shares_reference) is not copied: only the trained
tensors are kept, and swapped in while the reference is evaluated. Any other policy is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polyrhythm.policies.base import Evaluation, Observations, OptionalMethods, Policy, as_module, extended
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.ranks import Ranks


class SharedReference:
    """The trained policy with the initial values of its trained tensors; the rest is the policy's own memory. During
    `evaluate` nothing else may read the policy's weights."""

    def __init__(self, policy: OptionalMethods, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self._state = policy.reference_state()

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """As the policy's, without gradient."""
        with torch.no_grad(), self._policy.as_reference(self._state):
            return self._policy.evaluate(obs, forward_inputs)

    def state_dict(self) -> dict[str, Tensor]:
        """The initial values of the trained tensors."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. ValueError: it is of another policy."""
        own = self._policy.state_dict()
        if odd := sorted(state.keys() - own.keys()):
            raise ValueError(f"the state of the reference policy has {odd[0]}, the policy does not")
        parts = {name: self._ranks.part(x, own[name]).to(own[name].device, copy=True) for name, x in state.items()}
        self._state = {name: self._ranks.join(part, own[name]) for name, part in parts.items()}


Reference = Policy | SharedReference


def room_for_copy(policy: Policy) -> Policy | None:
    """A copy of a policy before it is sharded, as it cannot be copied afterwards; None if its
    reference shares its memory."""
    return None if policy_traits(policy).shares_reference else copy.deepcopy(policy)


def make_reference(
    policy: Policy, ranks: Ranks, state: Mapping[str, Tensor] | None = None, room: Policy | None = None
) -> Reference:
    """The policy as it is now, or with the state_dict of a reference. room: from `room_for_copy`,
    sharded like the policy."""
    if policy_traits(policy).shares_reference:
        shared = SharedReference(extended(policy), ranks)
        if state is not None:
            shared.load_state_dict(state)
        return shared
    copied = copy.deepcopy(policy) if room is None else room
    module = as_module(copied).requires_grad_(requires_grad=False).eval()
    if room is not None and state is None:
        state = policy.state_dict()
    if state is not None and room is None:
        module.load_state_dict(state)
    elif state is not None:
        _fill_all(module.state_dict(), state, ranks)
    return copied


def load_weights(module: nn.Module, state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Restore published or saved tensors, whole or sharded, in a module that may be sharded. ValueError: they
    are of another policy."""
    if ranks.divides:
        _fill_all(published_state(module), state, ranks)
    else:
        load_published(module, state)


@torch.no_grad()
def _fill_all(own: Mapping[str, Tensor], state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrite tensors with those of `state`, which are whole, or sharded alike."""
    if odd := sorted(own.keys() ^ state.keys()):
        raise ValueError(f"the state does not fit the policy: {odd[0]} (and {len(odd) - 1} more) is of another policy")
    for name, x in state.items():
        found, wanted = list(x.shape), list(own[name].shape)
        if found != wanted:
            raise ValueError(f"the state does not fit the policy: {name}: the shape is {found}, it should be {wanted}")
        ranks.part(own[name]).copy_(ranks.part(x, own[name]))
