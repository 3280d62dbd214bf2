"""What `GuaranteeChecker` checks of evaluations: where they run, who answers them, with which weights, that they end.

Reserved rows run background evaluations and nothing else; those evaluations run nowhere else. Pinned batches hold
all their requests and no others, and only the evaluator serves them. All episodes of an evaluation have one version.
Each episode is reported once at most.
Nobody waits who could go on: reserved rows, the evaluator, or a generator that may take weights. What is set aside
(`EpisodeSetAside`) is not started any more, training's episodes included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.records import (
    ApplyWeights,
    Command,
    EpisodeSetAside,
    Evaluate,
    EvaluationDone,
    Event,
    Request,
    SampleEvaluated,
    SampleFinished,
    Serve,
    SimulatorJoined,
    StartRows,
    StartStream,
)
from polyrhythm.scheduler.rollout.evaluation import noise_stream
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class Asked:
    """An evaluation that was asked for. versions: all that its tickets name or that answered its episodes; left: its
    episodes that were not reported yet."""

    wanted: int
    background: bool
    left: Counter[tuple[int, int, int]]
    finished: int = 0
    versions: set[int] = field(default_factory=set)


@dataclass(slots=True)
class EvaluationAudit:
    """Kept from events and commands, from the first one on.

    open: evaluations that have not ended, by name; background: names of all those in the background; tickets: theirs;
    names: ticket of an evaluation → its name; reserved: names of the reserved slots; set_aside: (background, task,
    seed) that get no ticket any more.
    """

    settings: SchedulerSettings
    open: dict[str, Asked] = field(default_factory=dict)
    background: set[str] = field(default_factory=set)
    tickets: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    set_aside: set[tuple[bool, int, int]] = field(default_factory=set)

    def note(self, event: Event, commands: list[Command]) -> str:
        """What is wrong with this decision, in words, or nothing."""
        wrong = ""
        if isinstance(event, SimulatorJoined):
            self.reserved |= {slot.slot for info in event.batches if info.reserved for slot in info.slots}
        elif isinstance(event, Evaluate):
            left = Counter((x.task, x.seed, noise_stream(x)) for x in event.episodes)
            self.open[event.name] = Asked(len(event.episodes), event.background, left)
            self.background |= {event.name} if event.background else set()
        elif isinstance(event, SampleFinished) and event.ticket in self.names:
            wrong = self._finish(event)
        for command in commands:
            wrong = wrong or self._follow(command)
        return wrong

    def _finish(self, event: SampleFinished) -> str:
        if self.names[event.ticket] not in self.open:  # it was given up meanwhile
            return ""
        return self._is_of(event.ticket, event.oldest, event.newest)

    def _is_of(self, ticket: int, *versions: int) -> str:
        """The ticket's evaluation is of these versions, which must be one, and the same for all its tickets."""
        name = self.names[ticket]
        known = self.open[name].versions
        known.update(versions)
        return f"evaluation {name} is of the versions {sorted(known)}" if len(known) > 1 or min(known) < 0 else ""

    def _follow(self, command: Command) -> str:
        evaluator = self.settings.evaluator
        if isinstance(command, StartRows):
            return self._start(command)
        if isinstance(command, EpisodeSetAside):
            self.set_aside.add((command.background, command.task, command.seed))
        if isinstance(command, Serve):
            batch = command.batch
            return self._serve(command, batch.generator, batch.requests, pinned=batch.pinned)
        if isinstance(command, StartStream):
            stream = command.stream
            return self._serve(command, stream.generator, (stream.request,), pinned=stream.pinned)
        if isinstance(command, ApplyWeights):
            is_evaluator = command.generator == evaluator
            wrong = command.pinned != is_evaluator and (command.pinned or self.settings.evaluator_only)
            return f"{evaluator} alone is the evaluator, but there is {command}" if wrong else ""
        return self._count(command)

    def _count(self, command: Command) -> str:
        if isinstance(command, SampleEvaluated):
            asked = self.open[command.name]
            asked.finished += 1
            asked.left[command.task, command.seed, command.noise] -= 1
            if asked.left[command.task, command.seed, command.noise] < 0:
                return f"no such episode is left, but there is {command}"
            if asked.versions != {command.version}:
                return f"it is of the versions {sorted(asked.versions)}, but there is {command}"
        elif isinstance(command, EvaluationDone):
            asked = self.open.pop(command.name)
            if (command.finished, command.finished + command.dropped) != (asked.finished, asked.wanted):
                return f"there is {command}, but of {asked.wanted} episodes {asked.finished} were told"
        return ""

    def _start(self, command: StartRows) -> str:
        for ticket in (grant.ticket for grant in command.grants):
            if (command.slot in self.reserved, ticket.task, ticket.seed) in self.set_aside:
                return f"task {ticket.task} with seed {ticket.seed} is set aside, but there is {command}"
            if ticket.evaluation in self.background:
                self.tickets.add(ticket.number)
            if (ticket.evaluation in self.background) != (command.slot in self.reserved):
                return f"reserved slots are {sorted(self.reserved)}, but there is {command}"
            if ticket.evaluation:
                self.names[ticket.number] = ticket.evaluation
                if wrong := self._is_of(ticket.number, ticket.version):
                    return wrong
        return ""

    def _serve(self, command: Command, generator: str, requests: tuple[Request, ...], *, pinned: bool) -> str:
        if any((request.slot in self.reserved) != pinned for request in requests):
            return f"reserved slots are {sorted(self.reserved)}, but there is {command}"
        is_evaluator = generator == self.settings.evaluator
        if pinned != is_evaluator and (pinned or self.settings.evaluator_only):
            return f"{self.settings.evaluator} alone is the evaluator, but there is {command}"
        return ""


def unbalanced(conductor: AnyConductor, book: EvaluationAudit) -> str:
    """What is wrong with the state of the evaluations, in words, or nothing."""
    rollout = conductor.rollout
    for evaluation in (*rollout.evaluations.queue, *rollout.evaluations.background):
        asked = book.open[evaluation.name]
        running = sum(sample.ticket.evaluation == evaluation.name for sample in rollout.samples.values())
        parts = (len(evaluation.waiting), evaluation.running, evaluation.finished, evaluation.dropped)
        pairs = len(evaluation.twins) // 2
        if (sum(parts) - pairs, parts[1], parts[2]) != (evaluation.wanted, running, asked.finished):
            return f"{running} episodes run and {asked.finished} were told of {evaluation}"
    for slot in rollout.rows.slots.values():
        background = [ticket in book.tickets for ticket in slot.tickets.values()]
        if slot.tickets and (any(background) != slot.reserved or all(background) != slot.reserved):
            return f"reserved slots are {sorted(book.reserved)}, but there is {slot}"
    return _waiting(conductor)


def _waiting(conductor: AnyConductor) -> str:
    """Who waits although it could go on."""
    rollout, versions, serving = conductor.rollout, conductor.versions, conductor.serving
    if due := _lacking_weights(conductor):
        return f"these generators wait for weights that they may take: {due}"
    evaluation, evaluator = rollout.evaluations.current_background, serving.generators.evaluator
    if evaluation is not None and evaluation.version < 0 <= versions.published and evaluator and not evaluator.pinning:
        return f"{evaluation} waits for weights that {evaluator} could take"
    rules = conductor.settings.scoring
    under_way = sum(each.running for each in rollout.evaluations.under_way)
    full = rules is not None and under_way >= rules.max_evaluations
    if rules is not None and under_way > rules.max_evaluations:
        return f"{under_way} episodes of evaluations run or wait for scores, {rules.max_evaluations} may"
    if evaluation is not None and evaluation.version >= 0 and rollout.rows.reserved and not full:
        limits = conductor.settings
        last = min(limits.max_attempts, limits.quarantine_after or limits.max_attempts)
        # One that lost its simulators until its last attempt has that as the only such one.
        due = evaluation.waiting if not evaluation.running else [t for t in evaluation.waiting if t.attempt < last]
        if due:
            return f"{evaluation} waits although the rows {rollout.rows.reserved} are free"
    if serving.background and evaluator is not None and not evaluator.busy and evaluator.pinned >= 0:
        held = [stream.request.rows for stream in evaluator.streams.values() if stream.pinned]
        if held and sum(held) + serving.background[0].rows > conductor.settings.max_rows:
            return ""
        return f"{evaluator} is idle although {serving.background} wait"
    return ""


def _lacking_weights(conductor: AnyConductor) -> list[GeneratorState]:
    """Free generators that may take weights: an independent statement of `due_weights`, over all of them."""
    versions, evaluations = conductor.versions, conductor.rollout.evaluations
    generators = conductor.serving.generators
    present = [g for g in generators.present.values() if g.name not in generators.off]
    live = {g.name for g in present if g.version >= max(0, versions.applied)}
    free = [g for g in present if g.batch is None and g.applying is None]
    if evaluations.begun:
        return [g for g in free if g.name not in live]
    behind = [g for g in free if g.version < versions.published]
    quiet = not conductor.ledger.running
    if quiet or conductor.settings.on_update != "drain" or not live:
        return behind
    return [g for g in behind if g.name not in live and versions.published == versions.applied]


def disagreeing(conductor: AnyConductor) -> str:
    """Where the two halves of the scheduler know different things of a slot, in words, or nothing."""
    rows, served = conductor.rollout.rows, conductor.serving.slots
    live = {name for name, slot in rows.slots.items() if slot.tickets}
    if rows.slots.keys() != served.slots.keys() or live != {name for name, slot in served.slots.items() if slot.live}:
        return f"slots with tickets are {sorted(live)}, but serving has {served}"
    counts = (rows.live, served.live, sum(not served.slots[name].reserved for name in live))
    return f"{counts} slots are live by tickets, by serving and counted" if len(set(counts)) > 1 else ""
