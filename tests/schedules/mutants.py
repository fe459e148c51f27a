"""Mutants: programs with a small random fault, some of them harmless."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from stagewright.schedules import Instruction, Program, ScheduleError, create, names
from stagewright.schedules import instructions as ins
from stagewright.schedules.updates import has_updates

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
            made[f"{name} P={num_ranks} M={num_microbatches}"] = schedule.program()
            if num_microbatches < 6:
                made[f"{name} P={num_ranks} M={num_microbatches} twice"] = schedule.program(2)
    for name, num_ranks, num_microbatches in (("gpipe", 2, 3), ("1f1b", 3, 4), ("zb-h1", 3, 3)):
        program = create(name, num_ranks=num_ranks, num_microbatches=num_microbatches).program(2)
        made[f"{name} sharded"] = with_sharding(program)
        made[f"{name} scalars"] = with_scalars(program)
        made[f"{name} late"] = with_late_steps(program)
    return made


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
    together = pick.random() < 0.7 and not isinstance(chosen, ins.Step)
    for stream, place in places if together else [(stream, place)]:
        instruction = stream[place]
        same = getattr(instruction, "microbatch", -1) == getattr(chosen, "microbatch", -2)
        if not together or (same and instruction.stage == chosen.stage):
            kept = version or 0 if isinstance(instruction, ins.Step) else version
            stream[place] = replace(instruction, version=kept)


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
    drop,
    duplicate,
    move,
    move,
    move_across,
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
    """Mutants without end, each with what was done to it.

    Those that lost all of their updates or all of their communication are left out: such programs get
    them added before they are proved.
    """
    pick = random.Random(seed)
    bases = list(programs().items())
    while True:
        name, program = pick.choice(bases)
        streams = [list(stream) for stream in program.streams]
        chosen = pick.choices(MUTATIONS, k=pick.choice((1, 1, 1, 2)))
        for mutation in chosen:
            if all(streams):
                mutation(streams, pick)
        mutant = replace(program, streams=tuple(map(tuple, streams)))
        if pick.random() < 0.1:
            mutant = loosen(mutant, pick)
        tokens = "".join(map(str, (token for stream in streams for token in stream)))
        if has_updates(mutant) and ("SEND" in tokens or "RECV" in tokens or program.num_ranks == 1):
            yield f"{name}: {', '.join(mutation.__name__ for mutation in chosen)}", mutant
