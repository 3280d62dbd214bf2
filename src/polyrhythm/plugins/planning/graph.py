"""The workflow graph: which worker sends what to which. Extracted from a run's stations, or from the puts and gets of a
workflow's first items; never written by hand.

    flows ──▶ WorkflowGraph ──▶ components (cycles as one node, in order of the data) ──▶ cuts

A flow that is `later` carries what the next version uses (weights): nobody waits for it within a version, so it makes
no cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError

#: The process that calls a workflow's workers; it takes no device.
DRIVER = "driver"
#: Nodes at most whose cuts are listed.
_MOST_NODES = 16

#: Workers that are planned as one: a cycle, or a worker alone.
Component = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Items from `source` to `target` by `channel`. later: they are for the next version."""

    channel: str
    source: str
    target: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class WorkflowGraph:
    """Workers and the flows between them. ConfigError: a worker of several has no flow."""

    nodes: tuple[str, ...]
    flows: tuple[Flow, ...]

    def __post_init__(self) -> None:
        joined = {name for flow in self.flows for name in (flow.source, flow.target)}
        if alone := [name for name in self.nodes if name not in joined and len(self.nodes) > 1]:
            raise ConfigError(
                f"worker {alone[0]!r} sends and receives nothing, so it has no place in the workflow; give it a "
                "channel that another worker uses, or plan without it"
            )
        if len(self.nodes) > _MOST_NODES:
            raise ConfigError(f"plan: the workflow has {len(self.nodes)} workers; at most {_MOST_NODES} can be planned")

    def targets(self, node: str) -> tuple[str, ...]:
        """The nodes that wait for this one within a version."""
        return tuple(dict.fromkeys(flow.target for flow in self.flows if flow.source == node and not flow.later))

    def components(self) -> tuple[Component, ...]:
        """The strongly connected components, sources first (Tarjan)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[Component] = []

        def visit(node: str) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            for target in self.targets(node):
                if target not in index:
                    visit(target)
                    low[node] = min(low[node], low[target])
                elif target in stack:
                    low[node] = min(low[node], index[target])
            if low[node] == index[node]:
                place = stack.index(node)
                own = set(stack[place:])
                del stack[place:]
                found.append(tuple(name for name in self.nodes if name in own))

        for node in self.nodes:
            if node not in index:
                visit(node)
        return tuple(reversed(found))

    def cuts(self, parts: Collection[Component]) -> Iterator[tuple[tuple[Component, ...], tuple[Component, ...]]]:
        """All ways to divide these components so that nothing flows from the second part to the first."""
        own = list(parts)
        names = [set(part) for part in own]
        feeds = [
            sum(1 << other for other, theirs in enumerate(names) if other != place and self._any(part, theirs))
            for place, part in enumerate(own)
        ]
        for chosen in range(1, (1 << len(own)) - 1):
            later = [place for place in range(len(own)) if not chosen >> place & 1]
            if all(not feeds[place] & chosen for place in later):
                first = tuple(part for place, part in enumerate(own) if chosen >> place & 1)
                yield first, tuple(own[place] for place in later)

    def _any(self, sources: Iterable[str], targets: Collection[str]) -> bool:
        return any(target in targets for source in sources for target in self.targets(source))


def graph_of_run(config: RunConfig) -> WorkflowGraph:
    """The graph of `train`, from the stations of the configuration and what they exchange."""
    nodes = ["simulator", "generator"]
    flows = [Flow("requests", "simulator", "generator"), Flow("actions", "generator", "simulator")]
    samples = "simulator"
    if config.scoring is not None:
        nodes.append("scorer")
        flows.append(Flow("finished", samples, "scorer"))
        samples = "scorer"
    nodes.append("trainer")
    flows += [Flow("samples", samples, "trainer"), Flow("weights", "trainer", "generator", later=True)]
    return WorkflowGraph(tuple(nodes), tuple(flows))


def graph_of_workflow(
    groups: Iterable[str],
    traffic: Mapping[str, tuple[Collection[str], Collection[str]]],
    passed: Collection[tuple[str, str]],
) -> WorkflowGraph:
    """The graph of a user's workflow. groups: its workers' groups; traffic: who put into and who got from each channel
    (`Workflow.traffic`); passed: channels between which the driver passes items on (`Workflow.passed`), which flow
    between the workers at their ends."""
    flows: list[Flow] = []
    for channel, (sources, targets) in traffic.items():
        flows += [Flow(channel, source, target) for source in sorted(sources) for target in sorted(targets)]
    into = [flow for flow in flows if flow.target == DRIVER]
    out = [flow for flow in flows if flow.source == DRIVER]
    through = [
        Flow(f"{first.channel}, {second.channel}", first.source, second.target)
        for first in into
        for second in out
        if (first.channel, second.channel) in passed
    ]
    kept = [flow for flow in flows if DRIVER not in (flow.source, flow.target)]
    fed = {flow.target for flow in out} | {flow.source for flow in into}
    nodes = tuple(groups)
    known = {name for flow in (*kept, *through) for name in (flow.source, flow.target)}
    outside = [Flow("driver", name, name) for name in nodes if name in fed - known]  # fed by the driver alone
    return WorkflowGraph(nodes, tuple(dict.fromkeys([*kept, *through, *outside])))
