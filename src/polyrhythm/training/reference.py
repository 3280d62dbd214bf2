"""The reference policy of the KL term: the policy as it was when the first update began.

A policy that shares its frozen tensors with its reference (`policies.base.SharesReference`) is not copied: only what
training changes is kept, and put in its place while the reference is asked. Any other policy is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from polyrhythm.policies.base import Evaluation, Observations, Policy, SharesReference, as_module


class SharedReference:
    """The trained policy with what training changes as it was; the rest is the policy's own memory.

    While it is asked, nobody else may read the policy's weights.
    """

    def __init__(self, policy: SharesReference) -> None:
        self._policy = policy
        self._state = policy.reference_state()

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """As the policy's, without gradient."""
        with torch.no_grad(), self._policy.as_reference(self._state):
            return self._policy.evaluate(obs, forward_inputs)

    def state_dict(self) -> dict[str, Tensor]:
        """What was kept."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. ValueError: it is of another policy."""
        own = self._policy.state_dict()
        if odd := sorted(state.keys() - own.keys()):
            raise ValueError(f"the state of the reference policy has {odd[0]}, the policy does not")
        self._state = {name: x.to(own[name].device, copy=True) for name, x in state.items()}


Reference = Policy | SharedReference


def make_reference(policy: Policy, state: Mapping[str, Tensor] | None = None) -> Reference:
    """The policy as it is now, or as it was when its reference had this state_dict."""
    if isinstance(policy, SharesReference):
        shared = SharedReference(policy)
        if state is not None:
            shared.load_state_dict(state)
        return shared
    copied = copy.deepcopy(policy)
    module = as_module(copied).requires_grad_(requires_grad=False).eval()
    if state is not None:
        module.load_state_dict(state)
    return copied
