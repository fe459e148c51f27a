"""Executor: runs one rank's instruction stream.

The stream is compiled once into bound calls, one an instruction; a run calls them in order. To follow one
microbatch: ``_forward`` takes its letter, runs the stage and puts the letter for the next stage down, from where a
SEND takes it; ``_backward``, or ``_input_gradient`` and ``_weight_gradient``, do the same with gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, assert_never

import torch

from stagewright.engine.errors import PeerError
from stagewright.engine.loss import BatchLoss
from stagewright.engine.mail import Mail
from stagewright.engine.randomness import Seeds
from stagewright.engine.replicas import Replicas
from stagewright.engine.stage import Gradients, Stage, gradients_as_value, gradients_of_value
from stagewright.engine.transport.contract import Session, Transport
from stagewright.engine.updater import Updater
from stagewright.engine.value import Layout, Packed, Value, pack
from stagewright.schedules import Instruction, Program
from stagewright.schedules import instructions as ins

Action = Callable[[], None]


class Run:
    """What one run of a program works on and brings forth.

    Args:
        step: counts the batches, for the random numbers.
        inputs: one a microbatch, on ranks that own the first stage.
        keywords: further arguments of the stages, one dict a microbatch.
        loss: gathers the losses; None where only outputs are wanted.
        train: gradients are wanted.
    """

    def __init__(
        self,
        step: int,
        inputs: Sequence[Value],
        keywords: Sequence[Mapping[str, Value]],
        loss: BatchLoss | None,
        *,
        train: bool,
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.keywords = keywords
        self.loss = loss
        self.train = train
        self.outputs: dict[int, Value] = {}
        self.times: list[tuple[float, float]] = []


class Executor:
    """One rank's stream, compiled.

    Args:
        program: a verified program.
        stages: this rank's stages by index.
        transport: connects the ranks.
        updater: steps the optimizer.
        seeds: of the random numbers of the stages.
        fixed_shapes: every run has the shapes of the first; some transports are faster then.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Transport,
        updater: Updater,
        seeds: Seeds,
        *,
        fixed_shapes: bool = False,
    ) -> None:
        self.program = program
        self._transport = transport
        self._stages = stages
        self._updater = updater
        self._seeds = seeds
        self._mail = Mail(program, transport)
        self._replicas = Replicas(program, {index: stage.module for index, stage in stages.items()}, transport)
        self._session = Session(fixed_shapes)
        self._run: Run
        self._started = 0.0
        self._stream = program.streams[transport.rank]
        self._actions = self._compile()

    def run(self, run: Run) -> None:
        """Execute the stream once.

        Raises:
            PeerError: another rank has failed.
            Exception: whatever a stage, the loss or the optimizer raises, with a note that says where.
        """
        self._run = run
        self._transport.begin(self._session)
        self._replicas.begin()
        times = run.times
        try:
            with torch.set_grad_enabled(run.train):
                for action in self._actions:
                    self._started = perf_counter()
                    action()
                    times.append((self._started, perf_counter()))
            self._replicas.finish_all()
            self._transport.end()
        except BaseException as error:
            self._fail(error, len(times))
            raise
        assert self._mail.is_empty, "a verified program leaves nothing behind"

    def _fail(self, error: BaseException, index: int) -> None:
        """Say where, tell the other ranks, and leave nothing behind that a later run could trip over."""
        self._mail.clear()
        for stage in self._stages.values():
            stage.clear()
        if isinstance(error, PeerError):
            return
        at = self._stream[index] if index < len(self._stream) else "the end of the program"
        where = f"rank {self._transport.rank} failed at {at} (step {self._run.step})"
        error.add_note(where)
        self._transport.abort(f"{where}: {type(error).__name__}: {error}")

    def _compile(self) -> tuple[Action, ...]:
        """Bind every instruction; a forward also learns how many of its stage are still to come."""
        num_left = dict.fromkeys(self._stages, 0)
        actions: list[Action] = []
        for instruction in reversed(self._stream):
            actions.append(self._bind(instruction, num_left))
        return tuple(reversed(actions))

    def _bind(self, instruction: Instruction, num_left: dict[int, int]) -> Action:
        match instruction:
            case ins.Forward(stage, microbatch):
                num_left[stage] += 1
                return partial(self._forward, self._stages[stage], microbatch, num_left[stage] - 1)
            case ins.Backward(stage, microbatch):
                return partial(self._backward, self._stages[stage], microbatch)
            case ins.InputGradient(stage, microbatch):
                return partial(self._input_gradient, self._stages[stage], microbatch)
            case ins.WeightGradient(stage, microbatch):
                return partial(self._weight_gradient, self._stages[stage], microbatch)
            case ins.Overlap(forward, backward):
                return partial(self._overlap, self._bind(forward, num_left), self._bind(backward, num_left))
            case ins.SendActivation(stage, microbatch):
                return self._mail.sender((True, stage + 1, microbatch))
            case ins.SendGradient(stage, microbatch):
                return self._mail.sender((False, stage - 1, microbatch))
            case ins.ReceiveActivation(stage, microbatch):
                return self._mail.receiver((True, stage, microbatch))
            case ins.ReceiveGradient(stage, microbatch):
                return self._mail.receiver((False, stage, microbatch))
            case ins.ReduceGradient(stage):
                return partial(self._replicas.start, stage)
            case ins.Step(stage):
                return partial(self._step, stage)
            case ins.Unshard() | ins.Reshard():
                return _nothing  # every rank holds its stages whole
            case ins.ReduceTied() | ins.SyncScalars():
                raise NotImplementedError(f"the engine does not run {instruction} yet")
            case _:
                assert_never(instruction)

    def _forward(self, stage: Stage, microbatch: int, num_left: int) -> None:
        """activation[stage] = stage(activation[stage - 1])."""
        run, index = self._run, stage.index
        if index:
            received = self._mail.take((True, index, microbatch))
        else:
            received = _without_gradient(pack(run.inputs[microbatch], "the batch", "x"))
        self._started = perf_counter()
        with self._transport.baton, self._seeds:
            output = stage.forward(microbatch, run.step, received, run.keywords[microbatch], num_left)
            if index < self.program.num_stages - 1:
                self._mail.put((True, index + 1, microbatch), stage.hand_on(microbatch, output))
            elif run.loss is None:
                run.outputs[microbatch] = output
            else:
                loss = run.loss.of(microbatch, output)
                stage.end_with(microbatch, loss, run.loss.shares[microbatch])

    def _backward(self, stage: Stage, microbatch: int) -> None:
        """dx, dw = gradients at dy; weights.grad += dw."""
        dy = self._gradients_for(stage, microbatch)
        with self._transport.baton, self._seeds:
            self._pass_back(stage, microbatch, stage.backward(microbatch, dy))

    def _input_gradient(self, stage: Stage, microbatch: int) -> None:
        """dx = gradient at dy."""
        dy = self._gradients_for(stage, microbatch)
        with self._transport.baton, self._seeds:
            self._pass_back(stage, microbatch, stage.input_gradient(microbatch, dy))

    def _weight_gradient(self, stage: Stage, microbatch: int) -> None:
        """weights.grad += dw."""
        with self._transport.baton:
            stage.weight_gradient(microbatch)

    def _overlap(self, forward: Action, backward: Action) -> None:
        """A fused pair: one after the other here, with nothing in between."""
        forward()
        started = self._started
        backward()
        self._started = started

    def _step(self, stage: int) -> None:
        """weights = optimizer(weights, weights.grad)."""
        self._replicas.finish(stage)
        self._started = perf_counter()
        with self._transport.baton:
            self._updater.step()

    def _gradients_for(self, stage: Stage, microbatch: int) -> Gradients | None:
        """dy, once it has arrived; None on the last stage, which starts from its loss."""
        if stage.index == self.program.num_stages - 1:
            return None
        letter = self._mail.take((False, stage.index, microbatch))
        self._started = perf_counter()
        return gradients_of_value(letter)

    def _pass_back(self, stage: Stage, microbatch: int, dx: Gradients) -> None:
        if stage.index:
            self._mail.put((False, stage.index - 1, microbatch), gradients_as_value(dx))


def _nothing() -> None:
    """Nothing is to be done."""


def _without_gradient(packed: Packed) -> Packed:
    """The user's input: no gradient goes back for it."""
    layout = packed.layout
    plain: Any = (False,) * len(layout.differentiable)
    return Packed(Layout(layout.skeleton, layout.dtypes, layout.shapes, plain), packed.tensors)
