"""An interpreter of the instruction semantics, to hold ``verify`` against.

It runs a program as ranks would, with dicts, queues and sets in place of tensors, straight from the meaning
of each instruction, and knows nothing of how ``verify`` argues. Whether a program is legal is whether every
rank comes to the end of its stream without an instruction that cannot mean anything, and nothing is left.
"""

from collections import defaultdict, deque

from stagewright.schedules import Program
from stagewright.schedules import instructions as ins

MESSAGES = (ins.SendActivation, ins.ReceiveActivation, ins.SendGradient, ins.ReceiveGradient)


class IllegalError(Exception):
    """An instruction cannot do what it says."""


class BlockedError(Exception):
    """An instruction must wait for another rank."""


def run(program: Program, semantics: str) -> str:
    """Run a program; the empty string where it is legal, else what went wrong."""
    world = World(program, semantics)
    ranks = [Rank(world, rank) for rank in range(len(program.streams))]
    world.ranks = ranks
    try:
        while any(not rank.finished for rank in ranks):
            moved = [rank.advance() for rank in ranks]
            if not any(moved):
                return "stuck: " + ", ".join(f"{r.rank}: {r.stream[r.next]}" for r in ranks if not r.finished)
        for rank in ranks:
            rank.leave()
        world.leave()
    except IllegalError as error:
        return str(error)
    return ""


def illegal_if(condition: bool, reason: object) -> None:
    if condition:
        raise IllegalError(str(reason))


def block_if(condition: bool) -> None:
    if condition:
        raise BlockedError


class World:
    """What lies between the ranks: channels, and the collectives that several ranks take part in."""

    def __init__(self, program: Program, semantics: str) -> None:
        self.program, self.semantics = program, semantics
        self.rule = program.updates
        self.num_microbatches = program.num_microbatches * program.num_batches
        self.num_stages = len(program.placement.routes[0])
        self.ranks: list[Rank] = []
        # Without any send or receive, results are handed over to wherever they are needed.
        self.silent = not any(isinstance(i, MESSAGES) for s in program.streams for i in s)
        # Names of messages by channel (source, destination, forward?), in the order of posting.
        self.sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
        self.posted: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
        # Reductions between two ranks: what one has issued and the other has not yet met.
        self.issued: dict[tuple[int, int], dict[int, deque[int]]] = defaultdict(lambda: defaultdict(deque))
        self.tied = {
            (rank, i.stage) for rank, s in enumerate(program.streams) for i in s if isinstance(i, ins.ReduceTied)
        }
        self.scalars = any(isinstance(i, ins.SyncScalars) for s in program.streams for i in s)
        self.reduced = {
            (rank, i.stage) for rank, s in enumerate(program.streams) for i in s if isinstance(i, ins.ReduceGradient)
        }
        self.sharded = {
            (rank, i.stage)
            for rank, s in enumerate(program.streams)
            for i in s
            if isinstance(i, ins.Unshard | ins.Reshard)
        }

    def owner(self, stage: int, microbatch: int) -> int:
        """The rank that owns a stage for a microbatch; nobody owns what does not exist."""
        if not (0 <= stage < self.num_stages and 0 <= microbatch < self.num_microbatches):
            return -1
        routes, assignment = self.program.placement.routes, self.program.placement.assignment
        return routes[assignment[microbatch % len(assignment)] if assignment else 0][stage]

    def holders(self, stage: int) -> set[int]:
        """The ranks that hold a copy of a stage."""
        if not 0 <= stage < self.num_stages:
            return set()
        return {route[stage] for route in self.program.placement.routes}

    def meet(self, channel: tuple[int, int, bool]) -> None:
        """The k-th message sent on a channel is the k-th received on it."""
        for sent, received in zip(self.sent[channel], self.posted[channel]):
            illegal_if(sent != received, f"{channel}: {sent} sent where {received} is received")

    def arrived(self, channel: tuple[int, int, bool], message: tuple[int, int]) -> bool:
        """Whether a posted message has come in."""
        if self.semantics == "in_order":  # the stream of the channel serves one after the other
            turn = self.posted[channel].index(message)
            return turn < len(self.sent[channel])
        return message in self.sent[channel]

    def issue(self, rank: int, stage: int) -> None:
        """A reduction: between any two ranks that both hold the stage, they must come in the same order."""
        for other in self.holders(stage) - {rank}:
            between = self.issued[min(rank, other), max(rank, other)]
            if between[other]:
                illegal_if(between[other].popleft() != stage, f"reductions of {rank} and {other} out of order")
            else:
                between[rank].append(stage)

    def leave(self) -> None:
        """Nothing is left on the way."""
        for channel in {*self.sent, *self.posted}:
            self.meet(channel)
            illegal_if(len(self.sent[channel]) != len(self.posted[channel]), f"left in channel {channel}")
        for between in self.issued.values():
            illegal_if(any(between.values()), "a reduction that others never joined")


class Rank:
    """One rank: its stream, its tensors, its weights."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.stream = world.program.streams[rank]
        self.next = 0
        self.stages = [stage for stage in range(world.num_stages) if rank in world.holders(stage)]
        # (stage, microbatch) of tensors that lie here, and of receives whose message may still be on its way.
        self.inputs: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        self.receives: dict[bool, dict[tuple[int, int], tuple[int, int, bool]]] = {True: {}, False: {}}
        self.outbox: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        self.stash: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self.done: set[tuple[str, int, int]] = set()
        self.under_way = False
        # Weights: by stage the versions that are kept; gradients: by stage and update the microbatches summed up.
        self.weights = {stage: [0] for stage in self.stages}
        self.buffers = {stage: set(range(1, world.rule.num_gradient_buffers + 1)) for stage in self.stages}
        self.gradients: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.reductions: dict[int, int] = defaultdict(int)
        self.ties: dict[int, int] = defaultdict(int)
        self.syncs = 0
        self.gathered: set[int] = set()

    @property
    def finished(self) -> bool:
        return self.next == len(self.stream)

    def advance(self) -> bool:
        """Do instructions until one must wait; whether any was done."""
        start = (self.next, self.under_way)
        while not self.finished:
            try:
                self.execute(self.stream[self.next])
            except BlockedError:
                break
            self.next += 1
            self.under_way = False
        return (self.next, self.under_way) != start

    def execute(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.Forward() | ins.Backward() | ins.InputGradient() | ins.WeightGradient():
                self.wait_for_input(instruction)
                self.compute(instruction)
            case ins.Overlap(forward, backward):
                self.wait_for_input(forward)
                self.wait_for_input(backward)
                same = (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch)
                illegal_if(same, "a pair of one microbatch")
                self.compute(forward)
                self.compute(backward)
            case ins.SendActivation(stage, microbatch):
                self.send(True, stage, microbatch, stage + 1)
            case ins.SendGradient(stage, microbatch):
                self.send(False, stage, microbatch, stage - 1)
            case ins.ReceiveActivation(stage, microbatch):
                self.post(True, stage, microbatch, stage - 1)
            case ins.ReceiveGradient(stage, microbatch):
                self.post(False, stage, microbatch, stage + 1)
            case ins.Unshard(stage):
                illegal_if(stage not in self.stages or stage in self.gathered, instruction)
                self.gathered.add(stage)
            case ins.Reshard(stage):
                illegal_if(stage not in self.gathered, instruction)
                self.gathered.remove(stage)
            case ins.ReduceGradient(stage):
                self.complete(stage, self.reductions[stage] + 1)
                self.reductions[stage] += 1
                self.world.issue(self.rank, stage)
            case ins.ReduceTied(stage):
                self.complete(stage, self.ties[stage] + 1)
                self.ties[stage] += 1
            case ins.SyncScalars():
                self.sync()
            case ins.Step(stage, version):
                self.step(stage, version)

    def wait_for_input(self, instruction: ins.Computation) -> None:
        """Wait until the input of an F or the incoming gradient of a B or I lies here."""
        stage, microbatch = instruction.stage, instruction.microbatch
        illegal_if(self.world.owner(stage, microbatch) != self.rank, f"{instruction} is not for rank {self.rank}")
        forward = isinstance(instruction, ins.Forward)
        if isinstance(instruction, ins.WeightGradient) or stage == (0 if forward else self.world.num_stages - 1):
            return
        message = (stage, microbatch)
        if message in self.inputs[forward]:
            return
        neighbour = self.world.owner(stage - 1 if forward else stage + 1, microbatch)
        block_if(self.world.silent and neighbour != self.rank)
        illegal_if(message not in self.receives[forward], f"{instruction} has no input")
        channel = self.receives[forward][message]
        block_if(not self.world.arrived(channel, message))
        self.world.meet(channel)
        del self.receives[forward][message]
        self.inputs[forward].add(message)

    def compute(self, instruction: ins.Computation) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        here, last = (stage, microbatch), self.world.num_stages - 1
        illegal_if((self.rank, stage) in self.world.sharded and stage not in self.gathered, f"{stage} is not gathered")
        version = self.weights[stage][-1] if instruction.version is None else instruction.version
        illegal_if(version not in self.weights[stage], f"{instruction}: only {self.weights[stage]}")
        match instruction:
            case ins.Forward():
                self.once("F", here)
                self.inputs[True].discard(here)
                self.stash[here] = version
                if stage < last:
                    self.hand_over(True, stage, microbatch, stage + 1)
            case ins.InputGradient():
                self.once("I", here)
                illegal_if(self.stash.pop(here, None) != version, f"{instruction}: no stash of that version")
                self.inputs[False].discard(here)
                self.kept[here] = version
                if stage > 0:
                    self.hand_over(False, stage, microbatch, stage - 1)
            case ins.WeightGradient():
                illegal_if(self.kept.pop(here, None) != version, f"{instruction}: nothing kept of that version")
                self.accumulate(stage, microbatch, version)
            case ins.Backward():
                self.once("I", here)
                illegal_if(self.stash.pop(here, None) != version, f"{instruction}: no stash of that version")
                self.inputs[False].discard(here)
                self.accumulate(stage, microbatch, version)
                if stage > 0:
                    self.hand_over(False, stage, microbatch, stage - 1)

    def once(self, what: str, here: tuple[int, int]) -> None:
        illegal_if((what, *here) in self.done, f"{what} of {here} again")
        self.done.add((what, *here))

    def hand_over(self, forward: bool, stage: int, microbatch: int, neighbour: int) -> None:
        """A result goes to the next stage here, or waits to be sent."""
        owner = self.world.owner(neighbour, microbatch)
        if owner == self.rank or self.world.silent:
            self.world.ranks[owner].inputs[forward].add((neighbour, microbatch))
        else:
            self.outbox[forward].add((stage, microbatch))

    def accumulate(self, stage: int, microbatch: int, version: int) -> None:
        """weights.grad += dw: into the buffer of the update that the microbatch belongs to."""
        rule = self.world.rule
        update = microbatch // rule.microbatches_per_update + 1
        illegal_if(update not in self.buffers[stage], f"no buffer for the gradient of {microbatch} on stage {stage}")
        illegal_if(update - 1 - version > rule.max_staleness, f"{microbatch} on stage {stage} is too stale")
        self.gradients[stage, update].add(microbatch)

    def send(self, forward: bool, stage: int, microbatch: int, neighbour: int) -> None:
        if not self.under_way:
            illegal_if((stage, microbatch) not in self.outbox[forward], f"{stage}, {microbatch}: nothing to send")
            self.outbox[forward].remove((stage, microbatch))
        channel = (self.rank, self.world.owner(neighbour, microbatch), forward)
        if not self.under_way:
            self.world.sent[channel].append((neighbour, microbatch))
            self.under_way = True
        if self.world.semantics == "rendezvous":
            block_if((neighbour, microbatch) not in self.world.posted[channel])

    def post(self, forward: bool, stage: int, microbatch: int, neighbour: int) -> None:
        source = self.world.owner(neighbour, microbatch)
        illegal_if(source in (-1, self.rank), f"nobody sends {stage}, {microbatch} to rank {self.rank}")
        illegal_if((stage, microbatch) in self.world.posted[source, self.rank, forward], "received twice")
        self.world.posted[source, self.rank, forward].append((stage, microbatch))
        self.receives[forward][stage, microbatch] = (source, self.rank, forward)

    def complete(self, stage: int, update: int) -> None:
        """All gradients of an update that are made here are in its buffer."""
        illegal_if(stage not in self.stages, f"stage {stage} is not on rank {self.rank}")
        per_update = self.world.rule.microbatches_per_update
        whole = range((update - 1) * per_update, update * per_update)
        illegal_if(whole.stop > self.world.num_microbatches, f"there is no update {update}")
        here = {microbatch for microbatch in whole if self.world.owner(stage, microbatch) == self.rank}
        illegal_if(self.gradients[stage, update] != here, f"update {update} of stage {stage} has not all its gradients")

    def sync(self) -> None:
        """This rank's part of the norm of an update: its gradients are complete, and summed over replicas and ties."""
        update = self.syncs + 1
        for stage in self.stages:
            self.complete(stage, update)
            self.needs_sums(stage, update)
            illegal_if(self.weights[stage][-1] >= update, "the step was made without the scalars")
        self.syncs += 1

    def needs_sums(self, stage: int, update: int) -> None:
        """This rank has issued the reductions of an update."""
        if len(self.world.holders(stage)) > 1 or (self.rank, stage) in self.world.reduced:
            illegal_if(self.reductions[stage] < update, f"stage {stage} is not reduced")
        if (self.rank, stage) in self.world.tied:
            illegal_if(self.ties[stage] < update, f"stage {stage} is not summed over its ties")

    def step(self, stage: int, version: int) -> None:
        illegal_if(stage not in self.stages, f"stage {stage} is not on rank {self.rank}")
        illegal_if(self.weights[stage][-1] != version - 1, f"version {version} after {self.weights[stage][-1]}")
        self.complete(stage, version)
        self.needs_sums(stage, version)
        illegal_if(self.world.scalars and self.syncs < version, "a step without its scalars")
        ranks = self.world.ranks
        if self.world.scalars:
            block_if(any(rank.syncs < version for rank in ranks))
        block_if(any(ranks[holder].reductions[stage] < version for holder in self.world.holders(stage) - {self.rank}))
        if (self.rank, stage) in self.world.tied:
            block_if(any(ranks[rank].ties[other] < version for rank, other in self.world.tied))
        self.buffers[stage].remove(version)
        self.buffers[stage].add(version + self.world.rule.num_gradient_buffers)
        del self.gradients[stage, version]
        self.weights[stage] = [*self.weights[stage], version][-self.world.rule.num_versions[self.rank] :]

    def leave(self) -> None:
        """Everything was done, and nothing is left here."""
        for stage in range(self.world.num_stages):
            for microbatch in range(self.world.num_microbatches):
                if self.world.owner(stage, microbatch) == self.rank:
                    done = ("F", stage, microbatch) in self.done and ("I", stage, microbatch) in self.done
                    illegal_if(not done, f"{microbatch} has not been through stage {stage}")
        for name in ("inputs", "receives", "outbox"):
            illegal_if(any(getattr(self, name).values()), f"rank {self.rank} has {name} left")
        illegal_if(bool(self.stash or self.kept), f"rank {self.rank} has a stash left")
        illegal_if(any(self.gradients.values()), f"rank {self.rank} has gradients left")
        illegal_if(bool(self.gathered), f"rank {self.rank} has gathered parameters left")
