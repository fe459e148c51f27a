"""Program: every rank's complete instruction stream, the thing that is drawn, proved, simulated and run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.instructions import (
    Backward,
    Forward,
    InputGradient,
    Instruction,
    Overlap,
    ReduceGradient,
    WeightGradient,
    parse,
)
from stagewright.schedules.placement import Placement, named
from stagewright.schedules.table import Table

Stream = tuple[Instruction, ...]

# Far above any real program: about ten million instructions.
MAX_CHARACTERS: Final = 64 * 2**20


@dataclass(frozen=True)
class UpdateRule:
    """When the weights change, how many versions of them live, and how old a gradient may be.

    Args:
        microbatches_per_update: microbatches whose gradients go into one ``STEP``; M for all but PipeDream, there 1, or
            one round over the replicas of all stages.
        num_versions: weight versions that each rank keeps, one number a rank; all 1 where there is a flush.
        max_staleness: updates by which the weights of a gradient may lag behind those it is applied to.
        num_gradient_buffers: gradient sums that each rank keeps per stage; 2 let backwards of the next update
            run before this one's ``STEP``.
    """

    microbatches_per_update: int
    num_versions: tuple[int, ...]
    max_staleness: int = 0
    num_gradient_buffers: int = 1

    def __post_init__(self) -> None:
        counts = (self.microbatches_per_update, self.num_gradient_buffers, *self.num_versions)
        if min(counts) < 1 or self.max_staleness < 0:
            raise ScheduleError(
                "an update takes 1 or more microbatches, a rank keeps 1 or more weight versions and gradient buffers, "
                f"staleness is 0 or more: got {self}",
                rule="update rule",
            )


@dataclass(frozen=True)
class Program:
    """Every rank's instruction stream, with what one must know to read it.

    Args:
        streams: ``streams[rank]`` is that rank's instructions, in the order in which it issues them.
        placement: which rank owns which stage.
        num_microbatches: microbatches of one batch.
        num_batches: batches that the program trains on; their microbatches are numbered on and on.
        updates: the rule by which weights change; by default one update a batch, one version, no staleness.
    """

    streams: tuple[Stream, ...]
    placement: Placement
    num_microbatches: int
    num_batches: int = 1
    update_rule: UpdateRule | None = None

    def __post_init__(self) -> None:
        if len(self.streams) != self.placement.num_ranks:
            raise ScheduleError(
                f"a program has one stream a rank: got {len(self.streams)} streams for a placement on "
                f"{self.placement.num_ranks} ranks"
            )
        if len(self.updates.num_versions) != self.num_ranks:
            raise ScheduleError(
                f"an update rule says how many weight versions each of the {self.num_ranks} ranks keeps: got "
                f"num_versions={self.updates.num_versions}",
                rule="update rule",
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.streams)

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.placement.num_stages

    @property
    def updates(self) -> UpdateRule:
        """The rule by which weights change."""
        return self.update_rule or UpdateRule(self.num_microbatches, (1,) * self.num_ranks)

    @cached_property
    def table(self) -> Table:
        """The program as columns of integers, built once and shared by proof and simulation."""
        return Table(self.streams, self.placement, self.num_microbatches * self.num_batches)

    def to_csv(self) -> str:
        """Write the streams in torch's format: one line a rank, cells separated by commas; an idle rank has none but
        empty cells, for a line without any is no rank's.
        """
        return "".join((",".join(map(str, stream)) or ",") + "\n" for stream in self.streams)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        num_chunks: int | None = None,
        placement: Placement | str | None = None,
        num_microbatches: int | None = None,
    ) -> "Program":
        """Read streams in torch's format, compute only or with communication; empty cells are idle.

        Args:
            text: one line a rank.
            num_chunks: stages a rank must own at most; a check where given.
            placement: which rank owns which stage, as such or by name (``"loop"``, ``"v"``, …); read off the
                computations where left out.
            num_microbatches: microbatches of one batch; all that occur where left out.

        Raises:
            ScheduleError: a cell is no token (rank, column and text are named), the stages do not fit the placement, or
                the text is too long.
        """
        if len(text) > MAX_CHARACTERS:
            raise ScheduleError(f"{len(text)} characters are too many for a program: at most {MAX_CHARACTERS}")
        streams = tuple(_parse_line(line, rank) for rank, line in enumerate(text.split("\n")) if line.strip())
        if not streams:
            raise ScheduleError("a program has at least one rank: the text holds no line with a token")
        computations = [_computations(stream) for stream in streams]
        total = 1 + max((microbatch for cells in computations for _, microbatch in cells), default=-1)
        if not total:
            raise ScheduleError("a program computes something: the text holds no computation", rule="missing compute")
        _check_numbers(computations, total)
        num_microbatches = total if num_microbatches is None else num_microbatches
        if num_microbatches < 1 or total % num_microbatches:
            raise ScheduleError(f"{total} microbatches are no whole number of batches of {num_microbatches}")
        if isinstance(placement, str):
            placement = named(placement, len(streams), _num_stages(computations), num_microbatches)
        placement = placement or _read_placement(streams, computations, total)
        if num_chunks is not None and placement.num_chunks != num_chunks:
            raise ScheduleError(f"a rank owns {placement.num_chunks} stages here, not num_chunks={num_chunks}")
        return cls(streams, placement, num_microbatches, total // num_microbatches)


def _parse_line(line: str, rank: int) -> Stream:
    stream: list[Instruction] = []
    for column, cell in enumerate(line.split(",")):
        token = cell.strip()
        if not token:
            continue
        try:
            stream.append(parse(token))
        except ScheduleError as error:
            reason = str(error).removeprefix(f"{error.rule}: ")
            raise ScheduleError(f"rank {rank}, column {column}: {reason}", rule=error.rule) from error
    return tuple(stream)


def _computations(stream: Stream) -> list[tuple[int, int]]:
    """The (stage, microbatch) of everything that a stream computes."""
    cells = []
    for instruction in stream:
        parts = (instruction.forward, instruction.backward) if isinstance(instruction, Overlap) else (instruction,)
        for part in parts:
            if isinstance(part, Forward | InputGradient | WeightGradient | Backward):
                cells.append((part.stage, part.microbatch))
    return cells


def _num_stages(computations: Sequence[Sequence[tuple[int, int]]]) -> int:
    return 1 + max((stage for cells in computations for stage, _ in cells), default=-1)


def _check_numbers(computations: Sequence[Sequence[tuple[int, int]]], num_microbatches: int) -> None:
    """Refuse a number so high that some below it cannot occur, before anything is sized by it."""
    num_stages = _num_stages(computations)
    num_cells = sum(map(len, computations))
    if num_stages * num_microbatches > num_cells:
        raise ScheduleError(
            f"every microbatch runs on every stage: {num_stages} stages and {num_microbatches} microbatches by their "
            f"highest numbers, but {num_cells} computations",
            rule="missing compute",
        )


def _read_placement(
    streams: Sequence[Stream], computations: Sequence[Sequence[tuple[int, int]]], num_microbatches: int
) -> Placement:
    """The placement under which every computation is where it should be: the first owner of a cell wins.

    A rank that computes nothing on a stage, but sums its gradients, has a replica of it that got no microbatch.
    """
    owner: dict[tuple[int, int], int] = {}
    for rank, cells in enumerate(computations):
        for cell in cells:
            owner.setdefault(cell, rank)
    num_stages = 1 + max((stage for stage, _ in owner), default=-1)
    routes: dict[tuple[int, ...], int] = {}
    assignment = []
    for microbatch in range(num_microbatches):
        missing = [stage for stage in range(num_stages) if (stage, microbatch) not in owner]
        if missing:
            raise ScheduleError(
                f"every microbatch runs on every stage: microbatch {microbatch} never runs on stage {missing[0]}",
                rule="missing compute",
            )
        route = tuple(owner[stage, microbatch] for stage in range(num_stages))
        assignment.append(routes.setdefault(route, len(routes)))
    first = next(iter(routes))
    for rank, stream in enumerate(streams):
        for stage in sorted({item.stage for item in stream if isinstance(item, ReduceGradient)}):
            if stage < num_stages and all(route[stage] != rank for route in routes):
                routes.setdefault((*first[:stage], rank, *first[stage + 1 :]), len(routes))
    return Placement(tuple(routes), tuple(assignment) if len(routes) > 1 else ())
