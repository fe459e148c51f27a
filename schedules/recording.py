"""Recording: measured steps in a file, with the program that ran and the costs that would have predicted them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median_low
from typing import Any, Final, NoReturn

from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import Instruction, Overlap, parse
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program, UpdateRule
from stagewright.schedules.table import (
    BACKWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SYNC_SCALARS,
    Table,
)
from stagewright.schedules.timeline import Timeline

FORMAT: Final = "stagewright trace 1"
# Far above any real recording: about a million instructions.
MAX_BYTES: Final = 64 * 2**20
# Of (stage, microbatch), and of (rank, stage, route): what a reader is ready to make tables of.
_MAX_CELLS: Final = 2**20
_MAX_INTEGER: Final = 10**9
_MAX_TIME: Final = 1e9
_MAX_TITLE: Final = 1000


@dataclass(frozen=True)
class Recording:
    """Steps of one program, as they were measured.

    Args:
        schedule: its name.
        costs: fitted to some steps of the run, in seconds and bytes.
        steps: timelines of one and the same program, in seconds.
    """

    schedule: str
    costs: Costs
    steps: tuple[Timeline, ...]

    @classmethod
    def of(cls, schedule: str, costs: Costs, timelines: Sequence[Timeline]) -> "Recording":
        """Record the newest of some timelines, and those of the others whose program is the same."""
        program = timelines[-1].program
        return cls(schedule, costs, tuple(timeline for timeline in timelines if timeline.program == program))

    @property
    def program(self) -> Program:
        """What ran."""
        return self.steps[-1].program

    @property
    def typical(self) -> Timeline:
        """The step of median length."""
        lengths = [step.makespan for step in self.steps]
        return self.steps[lengths.index(median_low(lengths))]

    def to_json(self) -> str:
        """Write a JSON object.

        It holds

        * ``format``; ``schedule``, a name;
        * ``program``: ``streams``, a line of tokens separated by commas for each rank; ``routes`` and ``assignment`` of
          its placement; ``num_microbatches`` of one batch and ``num_batches``; ``update_rule`` or null;
        * ``costs``: the fields of ``Costs`` that are not left out; a bandwidth without limit is null;
        * ``steps``: for each step, for each rank, the start and the end of each instruction, one after the other.
        """
        document = {
            "format": FORMAT,
            "schedule": self.schedule,
            "program": _program_to(self.program),
            "costs": {
                field.name: None if value == float("inf") else value
                for field in fields(Costs)
                if (value := getattr(self.costs, field.name)) is not None
            },
            "steps": [_times_of(step) for step in self.steps],
        }
        return json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recording":
        """Read what ``to_json`` has written, and nothing else.

        Raises:
            ValueError: the text is too large, or no JSON.
            ScheduleError: the JSON is no recording; the message says where.
        """
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text)} characters are too many for a recording: at most {MAX_BYTES}")
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("this is no recording: its JSON is nested too deeply") from None
        parts = _object(document, ("format", "schedule", "program", "costs", "steps"), "the recording")
        if parts["format"] != FORMAT:
            _refuse("format", repr(FORMAT), parts["format"])
        schedule = _text(parts["schedule"], "schedule", _MAX_TITLE)
        program = _program_from(parts["program"])
        costs = _costs_from(parts["costs"], program.num_stages)
        steps = _list(parts["steps"], "steps")
        if not steps:
            _refuse("steps", "one step or more", steps)
        timelines = [_timeline_from(step, program, costs, f"steps[{index}]") for index, step in enumerate(steps)]
        return cls(schedule, costs, tuple(timelines))


def _program_to(program: Program) -> dict[str, Any]:
    rule = program.update_rule
    return {
        "streams": [",".join(map(str, stream)) for stream in program.streams],
        "routes": program.placement.routes,
        "assignment": program.placement.assignment,
        "num_microbatches": program.num_microbatches,
        "num_batches": program.num_batches,
        "update_rule": rule and {field.name: getattr(rule, field.name) for field in fields(UpdateRule)},
    }


def _program_from(value: Any) -> Program:
    names = ("streams", "routes", "assignment", "num_microbatches", "num_batches", "update_rule")
    parts = _object(value, names, "program")
    streams = tuple(
        _stream_from(_text(stream, f"program.streams[{rank}]", MAX_BYTES), rank)
        for rank, stream in enumerate(_list(parts["streams"], "program.streams"))
    )
    routes = tuple(_integers(route, "a route") for route in _list(parts["routes"], "program.routes"))
    assignment = _integers(parts["assignment"], "program.assignment")
    num_microbatches = _integer(parts["num_microbatches"], "program.num_microbatches", least=1)
    num_batches = _integer(parts["num_batches"], "program.num_batches", least=1)
    num_stages = max(map(len, routes), default=0)
    _bound(num_stages * num_microbatches * num_batches, "stages and microbatches")
    _bound(num_stages * len(routes) * len(streams), "stages, routes and ranks")
    if len(assignment) != (num_microbatches if len(routes) > 1 else 0):
        _refuse("program.assignment", "a route for each microbatch where there are several, else nothing", assignment)
    if any(rank >= len(streams) for route in routes for rank in route):
        _refuse("program.routes", f"ranks below {len(streams)}", routes)
    placement = Placement(routes, assignment)
    program = Program(streams, placement, num_microbatches, num_batches, _rule_from(parts["update_rule"]))
    _check_rows(program.table)
    return program


def _stream_from(line: str, rank: int) -> tuple[Instruction, ...]:
    try:
        return tuple(map(parse, line.split(","))) if line else ()
    except ScheduleError as error:
        reason = str(error).removeprefix(f"{error.rule}: ")
        raise ScheduleError(f"program.streams[{rank}]: {reason}", rule=error.rule) from error


def _rule_from(value: Any) -> UpdateRule | None:
    if value is None:
        return None
    parts = _object(value, tuple(field.name for field in fields(UpdateRule)), "program.update_rule")
    versions = _integers(parts.pop("num_versions"), "program.update_rule.num_versions")
    counts = {name: _integer(part, f"program.update_rule.{name}") for name, part in parts.items()}
    return UpdateRule(num_versions=versions, **counts)


def _check_rows(table: Table) -> None:
    """Refuse what no rank can have run. A program here may be a window: what came before it is not to be seen."""
    stages_of = [set(table.placement.stages_of(rank)) for rank in range(table.num_ranks)]
    if table.repeated or table.outside or not any(operation <= BACKWARD for operation in table.operation):
        raise ScheduleError("a recorded program computes something, nothing twice, and nothing that does not exist")
    for rank, operation, stage, microbatch in zip(table.rank, table.operation, table.stage, table.microbatch):
        here = operation == SYNC_SCALARS or (
            stage in stages_of[rank] and (microbatch < 0 or table.placement.rank_of(stage, microbatch) == rank)
        )
        first, last = stage == 0, stage == table.num_stages - 1
        beyond = (last and operation in (SEND_ACTIVATION, RECEIVE_GRADIENT)) or (
            first and operation in (SEND_GRADIENT, RECEIVE_ACTIVATION)
        )
        if not here or beyond:
            raise ScheduleError(f"a recorded program is that of its placement: rank {rank} has no such stage {stage}")


def _times_of(timeline: Timeline) -> list[list[float]]:
    return [[time for event in events for time in (event.start, event.end)] for events in timeline.events]


def _timeline_from(value: Any, program: Program, costs: Costs, where: str) -> Timeline:
    """A timeline of which every rank does one instruction after the other."""
    of_ranks = _list(value, where)
    if len(of_ranks) != program.num_ranks:
        _refuse(where, f"the times of {program.num_ranks} ranks", of_ranks)
    starts: list[float] = []
    ends: list[float] = []
    for rank, (times, stream) in enumerate(zip(of_ranks, program.streams)):
        numbers = [_number(time, f"{where}[{rank}]") for time in _list(times, f"{where}[{rank}]")]
        if len(numbers) != 2 * len(stream) or any(later < earlier for earlier, later in pairwise(numbers)):
            _refuse(f"{where}[{rank}]", f"{2 * len(stream)} times, none before the one before it", times)
        for index, instruction in enumerate(stream):
            for _ in range(2 if isinstance(instruction, Overlap) else 1):
                starts.append(numbers[2 * index])
                ends.append(numbers[2 * index + 1])
    return Timeline(program, costs, tuple(starts), tuple(ends))


def _costs_from(value: Any, num_stages: int) -> Costs:
    known = {field.name for field in fields(Costs)}
    if not isinstance(value, dict) or not set(value) <= known:
        _refuse("costs", f"an object with some of {', '.join(sorted(known))}", value)
    given: dict[str, Any] = {}
    for name, cost in value.items():
        where = f"costs.{name}"
        if name == "bandwidth":
            given[name] = float("inf") if cost is None else _number(cost, where, most=1e30)
        elif isinstance(cost, list):
            given[name] = tuple(_number(number, where, most=1e30) for number in cost)
        else:
            given[name] = _number(cost, where, most=1e30)
    costs = Costs(**given)
    costs.of_stages(num_stages)
    return costs


def _object(value: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        _refuse(where, f"an object with {', '.join(names)}", value)
    return dict(value)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(where, "a list", value)
    return value


def _text(value: Any, where: str, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        _refuse(where, f"a text of at most {most} characters", value)
    return value


def _integers(value: Any, where: str) -> tuple[int, ...]:
    return tuple(_integer(number, where) for number in _list(value, where))


def _integer(value: Any, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_INTEGER:
        _refuse(where, f"a whole number from {least} to {_MAX_INTEGER}", value)
    return value


def _number(value: Any, where: str, most: float = _MAX_TIME) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -most <= value <= most:
        _refuse(where, f"a number of at most {most:g}", value)
    return float(value)


def _bound(number: int, what: str) -> None:
    if number > _MAX_CELLS:
        raise ScheduleError(f"too large for a recording: {number} combinations of {what}, at most {_MAX_CELLS}")


def _refuse(where: str, wanted: str, got: object) -> NoReturn:
    match got:
        case list() | tuple():
            shown = f"a list of {len(got)}"
        case dict():
            shown = f"an object of {len(got)}"
        case _:
            shown = repr(got)[:80]
    raise ScheduleError(f"this is no recording: {where} is {wanted}; got {shown}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"this is no recording: {name} is no number")
