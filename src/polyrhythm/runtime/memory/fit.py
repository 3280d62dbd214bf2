"""Whether tensors are those of a weights layout: all at once, or one at a time as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from polyrhythm.runtime.memory.tensors import State
from polyrhythm.specs.weights import WeightsLayout, WeightSpec, first_misfit, weight_specs

#: Tensors by name, one at a time: each may be gone when the next is asked for.
Stream = Iterable[tuple[str, Tensor]]


def fitting(layout: WeightsLayout, given: State | Stream) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the layout once, out of `given`; what else is there is left out.

    Of a mapping all are checked before this returns. Of a stream, which may have any order, the first is; the others as
    they come, and none is held while the next is asked for. ValueError: one is missing, given twice, or does not fit.
    """
    if isinstance(given, Mapping):
        check_fit(layout, given, convertible=True)
        return ((name, given[name]) for name in layout.published)
    return _begun(_each(layout, given))


def _each(layout: WeightsLayout, stream: Stream) -> Iterator[tuple[str, Tensor]]:
    specs = layout.published
    missing = dict(specs)
    for name, tensor in stream:
        if name in specs:
            if name not in missing:
                raise ValueError(f"weights do not fit the policy: {name} is given twice")
            _check_one(name, tensor, missing.pop(name))
            yield name, tensor
        del tensor
    for name, spec in missing.items():
        raise _misfit(name, None, spec)


def _begun(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, the first of which has been asked for."""
    first = [item for item in (next(tensors, None),) if item is not None]

    def go_on() -> Iterator[tuple[str, Tensor]]:
        while first:
            yield first.pop()
        yield from tensors

    return go_on()


def check_fit(layout: WeightsLayout, state: State, *, convertible: bool) -> None:
    """Raise ValueError unless `state` has all tensors of the layout. convertible: in any floating-point dtype."""
    found = weight_specs({name: tensor for name, tensor in state.items() if name in layout.published})
    if name := first_misfit(layout.published, found, convertible=convertible):
        raise _misfit(name, found.get(name), layout.published[name])


def _check_one(name: str, tensor: Tensor, spec: WeightSpec) -> None:
    found = weight_specs({name: tensor})
    if first_misfit({name: spec}, found, convertible=True):
        raise _misfit(name, found[name], spec)


def _misfit(name: str, found: WeightSpec | None, spec: WeightSpec) -> ValueError:
    return ValueError(f"weights do not fit the policy: {name} is {found or 'missing'}, the layout has {spec}")
