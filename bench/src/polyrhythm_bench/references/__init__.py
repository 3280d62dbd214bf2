"""Plain forward passes of the published policies, written with transformers' modules, to compare ours with.

Each is what a user would write from the papers: random weights, the same sizes and tokens, no layer of ours. What
transformers has no module for is torch.nn. `reference_of` makes the one for a policy.
"""

from __future__ import annotations

from typing import Any

from polyrhythm_bench.references.base import Reference


def reference_of(kind: str, size: Any, steps: int) -> Reference:
    """The reference of a policy type for its network's size. steps: K of the flow policies."""
    from polyrhythm_bench.references.groot_n1d5 import GrootReference
    from polyrhythm_bench.references.openvla_oft import OpenVlaOftReference
    from polyrhythm_bench.references.pi0 import Pi0Reference

    if kind == "openvla_oft":
        return OpenVlaOftReference(size)
    if kind == "groot_n1d5":
        return GrootReference(size, steps)
    return Pi0Reference(size, steps)
