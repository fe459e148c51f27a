"""Mutants: programs with a small random fault, some of them harmless."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from stagewright.schedules import Instruction, Program, ScheduleError, create, insert_communication, names
from stagewright.schedules import instructions as ins
from stagewright.schedules.agreements import insert_agreements
from stagewright.schedules.placement import bidirectional
from stagewright.schedules.updates import has_updates, update_after_batch

Streams = list[list[Instruction]]

SHAPES = ((1, 2), (2, 2), (2, 5), (3, 6), (4, 4), (4, 8))
RETYPED = {
    ins.Forward: ins.Backward,
    ins.Backward: ins.InputGradient,
    ins.InputGradient: ins.WeightGradient,
    ins.WeightGradient: ins.Backward,
    ins.SendActivation: ins.SendGradient,
    ins.SendGradient: ins.SendActivation,
    ins.ReceiveActivation: ins.ReceiveGradient,
    ins.ReceiveGradient: ins.ReceiveActivation,
    ins.Unshard: ins.Reshard,
    ins.Reshard: ins.Unshard,
    ins.ReduceGradient: ins.ReduceTied,
    ins.ReduceTied: ins.ReduceGradient,
}


def programs() -> dict[str, Program]:
    """Every registered schedule at several shapes, one batch and two, and programs that use what none of them does."""
    made: dict[str, Program] = {}
    for name in names():
        for num_ranks, num_microbatches in SHAPES:
            try:
                schedule = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            except ScheduleError:
                continue
            made[f"{name} P={num_ranks} M={num_microbatches}"] = program = schedule.program()
            if num_microbatches < 6:
                made[f"{name} P={num_ranks} M={num_microbatches} twice"] = schedule.program(2)
            else:
                made[f"{name} P={num_ranks} M={num_microbatches} silent"] = without_communication(program)
    made["both ways"] = both_ways(1)
    made["both ways twice"] = both_ways(2)
    for name, num_ranks, num_microbatches in (("gpipe", 2, 3), ("1f1b", 3, 4), ("zb-h1", 3, 3)):
        program = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(2)
        made[f"sharded {name}"] = with_sharding(program)
        made[f"scalars {name}"] = with_scalars(program)
        made[f"late {name}"] = with_late_steps(program)
        ends = (0, program.num_stages - 1)
        made[f"agreed {name}"] = insert_agreements(program, tied_stages=ends, scalars=True)
    return made


def without_communication(program: Program) -> Program:
    """The same computations and updates; what crosses ranks is left to be derived."""
    streams = (tuple(i for i in stream if "SEND" not in str(i) and "RECV" not in str(i)) for stream in program.streams)
    return replace(program, streams=tuple(streams))


def both_ways(num_batches: int) -> Program:
    """Four microbatches on two ranks, two of them each way, so that each rank has a copy of both stages."""
    placement = bidirectional(((0, 1), (1, 0)), 4)
    streams: list[tuple[Instruction, ...]] = []
    for near, far in ((0, 2), (2, 0)):
        stream: list[Instruction] = []
        for batch in range(num_batches):
            start, end = (
                [(stage, 4 * batch + first + index) for index in range(2)] for stage, first in ((0, near), (1, far))
            )
            order = [ins.Forward(*cell) for cell in start + end] + [ins.Backward(*cell) for cell in end + start]
            stream += update_after_batch(order, placement, len(streams), batch + 1)
        streams.append(tuple(stream))
    return insert_communication(Program(tuple(streams), placement, 4, num_batches))


def with_sharding(program: Program) -> Program:
    """Each rank gathers its stages first, frees them last, and reduces over data parallelism before it updates."""
    streams = []
    for rank, stream in enumerate(program.streams):
        stages = program.placement.stages_of(rank)
        reduced: list[Instruction] = []
        for instruction in stream:
            reduced += [ins.ReduceGradient(instruction.stage)] if isinstance(instruction, ins.Step) else []
            reduced.append(instruction)
        streams.append((*map(ins.Unshard, stages), *reduced, *map(ins.Reshard, stages)))
    return replace(program, streams=tuple(streams))


def with_scalars(program: Program) -> Program:
    """The first and the last stage share weights, and every update waits for the norm of all gradients."""
    last = program.num_stages - 1
    streams = []
    for stream in program.streams:
        woven: list[Instruction] = []
        for instruction in stream:
            if isinstance(instruction, ins.Step):
                woven += [ins.ReduceTied(instruction.stage)] if instruction.stage in (0, last) else []
                woven.append(ins.SyncScalars())
            woven.append(instruction)
        streams.append(tuple(woven))
    return replace(program, streams=tuple(streams))


def with_late_steps(program: Program) -> Program:
    """Two versions and two gradient buffers, so that a batch may begin on weights one update old."""
    streams = []
    for stream in program.streams:
        delayed: list[Instruction] = []
        waiting: list[Instruction] = []
        for instruction in stream:
            batch = getattr(instruction, "microbatch", 0) // program.num_microbatches
            if isinstance(instruction, ins.Step):
                waiting.append(instruction)
            elif hasattr(instruction, "version"):
                delayed.append(replace(instruction, version=max(batch - 1, 0)))
            else:
                delayed.append(instruction)
            if waiting and isinstance(instruction, ins.Backward | ins.WeightGradient) and batch:
                delayed.append(waiting.pop(0))
        streams.append((*delayed, *waiting))
    rule = replace(program.updates, num_versions=(2,) * program.num_ranks, max_staleness=1, num_gradient_buffers=2)
    return replace(program, streams=tuple(streams), update_rule=rule)


def swap(streams: Streams, pick: random.Random) -> None:
    """Two instructions near each other change places."""
    stream = pick.choice(streams)
    first = pick.randrange(len(stream))
    second = min(first + pick.choice((1, 1, 1, 2, 3, 8)), len(stream) - 1)
    stream[first], stream[second] = stream[second], stream[first]


def drop(streams: Streams, pick: random.Random) -> None:
    """An instruction is gone."""
    stream = pick.choice(streams)
    del stream[pick.randrange(len(stream))]


def duplicate(streams: Streams, pick: random.Random) -> None:
    """An instruction stands there twice."""
    stream = pick.choice(streams)
    stream.insert(pick.randrange(len(stream) + 1), pick.choice(stream))


def move(streams: Streams, pick: random.Random) -> None:
    """An instruction stands elsewhere on its rank, mostly not far away."""
    stream = pick.choice(streams)
    place = pick.randrange(len(stream))
    instruction = stream.pop(place)
    distance = pick.choice((1, 2, 3, 5, len(stream)))
    stream.insert(min(max(place + pick.randint(-distance, distance), 0), len(stream)), instruction)


def swap_alike(streams: Streams, pick: random.Random) -> None:
    """Two instructions of one kind change places on a rank, such as two sends or two reductions."""
    stream = pick.choice(streams)
    first = pick.randrange(len(stream))
    alike = [place for place, other in enumerate(stream) if type(other) is type(stream[first])]
    second = pick.choice(alike)
    stream[first], stream[second] = stream[second], stream[first]


def move_message(streams: Streams, pick: random.Random) -> None:
    """A send or a receive stands earlier or later on its rank."""
    _move_any(streams, pick, lambda token: "SEND" in token or "RECV" in token)


def move_update(streams: Streams, pick: random.Random) -> None:
    """A STEP, a reduction or a gather stands earlier or later on its rank."""
    _move_any(streams, pick, lambda token: not token[-1].isdigit() or "STEP" in token)


def _move_any(streams: Streams, pick: random.Random, wanted: Callable[[str], bool]) -> None:
    stream = pick.choice(streams)
    places = [place for place, instruction in enumerate(stream) if wanted(str(instruction))]
    if places:
        place = pick.choice(places)
        instruction = stream.pop(place)
        distance = pick.choice((1, 2, 4, 8, len(stream)))
        stream.insert(min(max(place + pick.randint(-distance, distance), 0), len(stream)), instruction)


def receive_late(streams: Streams, pick: random.Random) -> None:
    """Receives stand right before what they are for, on one rank or on all, so that sends wait for each other."""
    for stream in streams if pick.random() < 0.6 else [pick.choice(streams)]:
        posted: dict[tuple[bool, int, int], Instruction] = {}
        late: list[Instruction] = []
        for instruction in stream:
            if isinstance(instruction, ins.ReceiveActivation | ins.ReceiveGradient):
                forward = isinstance(instruction, ins.ReceiveActivation)
                posted[forward, instruction.stage, instruction.microbatch] = instruction
                continue
            parts = (
                (instruction.forward, instruction.backward) if isinstance(instruction, ins.Overlap) else (instruction,)
            )
            for part in parts:
                if isinstance(part, ins.Forward | ins.Backward | ins.InputGradient):
                    key = (isinstance(part, ins.Forward), part.stage, part.microbatch)
                    late += [posted.pop(key)] if key in posted else []
            late.append(instruction)
        stream[:] = [*late, *posted.values()]


def exchange(streams: Streams, pick: random.Random) -> None:
    """Two microbatches change roles, on one rank or on all."""
    numbers = sorted({i.microbatch for stream in streams for i in stream if hasattr(i, "microbatch")})
    one, other = pick.choice(numbers), pick.choice(numbers)
    renamed = {one: other, other: one}
    for stream in streams if pick.random() < 0.6 else [pick.choice(streams)]:
        for place, instruction in enumerate(stream):
            if isinstance(instruction, ins.Overlap):
                forward, backward = (
                    replace(part, microbatch=renamed.get(part.microbatch, part.microbatch))
                    for part in (instruction.forward, instruction.backward)
                )
                stream[place] = ins.Overlap(forward, backward)
            elif hasattr(instruction, "microbatch"):
                stream[place] = replace(
                    instruction, microbatch=renamed.get(instruction.microbatch, instruction.microbatch)
                )


def move_across(streams: Streams, pick: random.Random) -> None:
    """An instruction stands on another rank."""
    source, destination = pick.choice(streams), pick.choice(streams)
    instruction = source.pop(pick.randrange(len(source)))
    destination.insert(pick.randrange(len(destination) + 1), instruction)


def reversion(streams: Streams, pick: random.Random) -> None:
    """A computation uses another version, or a STEP makes another one; mostly a forward and its backward alike."""
    version = pick.choice((None, 0, 0, 1, 1, 2, 3))
    places = [(s, i) for s in streams for i, instruction in enumerate(s) if hasattr(instruction, "version")]
    stream, place = pick.choice(places)
    chosen = stream[place]
    if isinstance(chosen, ins.Step):
        stream[place] = replace(chosen, version=version or 0)
    elif pick.random() < 0.3:
        stream[place] = replace(chosen, version=version)
    else:
        for other_stream, other_place in places:
            instruction = other_stream[other_place]
            here = (instruction.stage, getattr(instruction, "microbatch", -1))
            if here == (chosen.stage, chosen.microbatch):
                other_stream[other_place] = replace(instruction, version=version)


def reroute(streams: Streams, pick: random.Random) -> None:
    """An instruction concerns another stage or microbatch, or does another thing to it; a pair comes apart."""
    stream = pick.choice(streams)
    place = pick.randrange(len(stream))
    instruction = stream[place]
    match instruction:
        case ins.Overlap(forward, backward):
            stream[place : place + 1] = pick.choice(([forward, backward], [backward, forward], [forward], [backward]))
        case ins.SyncScalars():
            stream[place] = ins.ReduceGradient(0)
        case _:
            field = pick.choice(("stage", "microbatch", "type"))
            if field == "type" and type(instruction) in RETYPED:
                stream[place] = RETYPED[type(instruction)](
                    *(getattr(instruction, name) for name in ("stage", "microbatch") if hasattr(instruction, name))
                )
            elif hasattr(instruction, field):
                stream[place] = replace(
                    instruction, **{field: max(getattr(instruction, field) + pick.choice((-1, 1)), 0)}
                )


MUTATIONS: tuple[Callable[[Streams, random.Random], None], ...] = (
    swap,
    swap,
    swap_alike,
    drop,
    duplicate,
    move,
    move,
    move_message,
    move_message,
    move_update,
    move_update,
    exchange,
    receive_late,
    move_across,
    reversion,
    reversion,
    reroute,
)


def loosen(program: Program, pick: random.Random) -> Program:
    """Other promises about versions, staleness and buffers."""
    rule = program.updates
    return replace(
        program,
        update_rule=replace(
            rule,
            num_versions=tuple(max(kept + pick.choice((-1, 0, 1)), 1) for kept in rule.num_versions),
            max_staleness=max(rule.max_staleness + pick.choice((-1, 0, 1)), 0),
            num_gradient_buffers=max(rule.num_gradient_buffers + pick.choice((-1, 0, 1)), 1),
        ),
    )


def mutants(seed: int) -> Iterator[tuple[str, Program]]:
    """Mutants without end, each with what was done to it; every schedule has the same share.

    Those that lost all of their updates are left out: such programs get them added before they are proved.
    """
    pick = random.Random(seed)
    families: dict[str, list[tuple[str, Program]]] = {}
    for name, program in programs().items():
        families.setdefault(name.split()[0], []).append((name, program))
    while True:
        name, program = pick.choice(families[pick.choice(list(families))])
        streams = [list(stream) for stream in program.streams]
        chosen = pick.choices(MUTATIONS, k=pick.choice((1, 1, 1, 2, 3)))
        for mutation in chosen:
            if all(streams):
                mutation(streams, pick)
        mutant = replace(program, streams=tuple(map(tuple, streams)))
        if pick.random() < 0.1:
            mutant = loosen(mutant, pick)
        if has_updates(mutant):
            yield f"{name}: {', '.join(mutation.__name__ for mutation in chosen)}", mutant
