"""Executor: runs one rank's instruction stream.

The stream is compiled once into bound calls, one an instruction; a run calls them in order. To follow one
microbatch: ``_forward`` takes its letter, runs the stage and puts the letter for the next stage down, from where a
SEND takes it; ``_backward``, or ``_input_gradient`` and ``_weight_gradient``, do the same with gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import assert_never

import torch

from stagewright.engine.assembly import Assembly
from stagewright.engine.control.progress import INDEX
from stagewright.engine.errors import NotFiniteError, PeerError, described
from stagewright.engine.mail import Mail
from stagewright.engine.run import Run
from stagewright.engine.stages.stage import Gradients, Stage
from stagewright.engine.timing.recorder import Moment, recorder_of
from stagewright.engine.transport.contract import Session
from stagewright.engine.value import pack_input, unpack_gradients
from stagewright.schedules import Instruction, Program
from stagewright.schedules import instructions as ins
from stagewright.schedules.windows import later

Action = Callable[[], None]


class Executor:
    """One rank's stream, compiled.

    Args:
        program: a verified program, or a piece of one.
        assembly: the parts of this rank.
        session: what the transport remembers of earlier runs of this program and its kin; nothing where left out.
        mail: what is in flight between pieces of one program; of its own where left out.
    """

    def __init__(
        self, program: Program, assembly: Assembly, *, session: Session | None = None, mail: Mail | None = None
    ) -> None:
        transport = assembly.transport
        self.program = program
        self._transport = transport
        self._group = assembly.group
        self._stages = assembly.stages
        self._sharded = assembly.sharded
        self._gradients = assembly.gradients
        self._updater = assembly.updater
        # Ranks that share a process have the generators only while they compute; others put them back after a run.
        shares_process = not isinstance(transport.baton, nullcontext)
        self._seeds_of_run = nullcontext() if shares_process else assembly.seeds
        self._callers_seeds = nullcontext if shares_process else assembly.seeds.lent
        self._seeds = assembly.seeds if shares_process else nullcontext()
        self._goes_on = mail is not None
        self._mail = mail or Mail(program, transport)
        self._session = session or Session(fixed_shapes=False)
        self._run: Run
        self._mark = recorder_of(transport.device).mark
        self._started: Moment = None
        self._stream = program.streams[transport.rank]
        self._updates = any(isinstance(instruction, ins.Step) for instruction in self._stream)
        self._actions = self._compile()
        self._progress = transport.progress
        self._number = self._progress.add(self._stream)

    def run(self, run: Run) -> None:
        """Execute the stream once.

        Raises:
            PeerError: another rank has failed.
            Exception: whatever a stage, the loss or the optimizer raises, with a note that says where.
        """
        self._run = run
        self._mail.later, self._mail.layouts = run.later_microbatches, run.layouts
        times, mark = run.times, self._mark
        self._progress.begin(self._number, run.step, run.later_microbatches, run.later_versions)
        cells = self._progress.cells
        try:
            if run.train:
                for stage in self._stages.values():
                    stage.check_frozen()
            if not self._goes_on:
                self._begin(run)
            with self._seeds_of_run, torch.set_grad_enabled(run.train):
                for cells[INDEX], action in enumerate(self._actions):
                    self._started = mark()
                    action()
                    times.append((self._started, mark()))
            if run.train and not self._updates and not self._goes_on:
                self._updater.finish_accumulating()
            if not self._goes_on:
                self._transport.end()
        except BaseException as error:
            self._fail(error, len(times))
            raise
        self._progress.end()
        assert self._goes_on or self._mail.is_empty, "a verified program leaves nothing behind"

    def _begin(self, run: Run) -> None:
        """Nothing is in flight: the trainer may have changed what it trains, and left gradients of earlier batches."""
        self._transport.begin(self._session)
        for stage in self._stages.values():
            stage.weights.publish()
        if run.train:
            self._updater.begin()

    def _fail(self, error: BaseException, index: int) -> None:
        """Say where, tell the other ranks, and leave nothing behind that a later run could trip over."""
        self._mail.clear()
        self._updater.clear()
        for stage in self._stages.values():
            stage.clear()
        if isinstance(error, PeerError):
            self._tell_failure(str(error))
            return
        if isinstance(error, NotFiniteError) and not self._goes_on:
            with suppress(PeerError):
                self._transport.end()  # every rank raises this here, with all messages taken: nobody need be told
            return
        later_numbers = self._run.later_microbatches, self._run.later_versions
        at = later(self._stream[index], *later_numbers) if index < len(self._stream) else "the end of the program"
        replica = f" of replica {self._group.rank}" if self._group.size > 1 else ""
        where = f"rank {self._transport.rank}{replica} failed at {at} (step {self._run.step})"
        error.add_note(where)
        self._tell_failure(f"{where}: {described(error)}")

    def _tell_failure(self, reason: str) -> None:
        """Let the other ranks of this pipeline know, and this one's in its replicas."""
        self._transport.abort(reason)
        self._group.abort(reason)

    def _compile(self) -> tuple[Action, ...]:
        """Bind every instruction; a forward also learns how many of its stage are still to come."""
        num_left = dict.fromkeys(self._stages, 0)
        actions: list[Action] = []
        for instruction in reversed(self._stream):
            actions.append(self._bind(instruction, num_left))
        return tuple(reversed(actions))

    def _bind(self, instruction: Instruction, num_left: dict[int, int]) -> Action:
        match instruction:
            case ins.Forward(stage, microbatch, version):
                num_left[stage] += 1
                return partial(self._forward, self._stages[stage], microbatch, version or 0, num_left[stage] - 1)
            case ins.Backward(stage, microbatch, version):
                return partial(self._backward, self._stages[stage], microbatch, version or 0)
            case ins.InputGradient(stage, microbatch, version):
                return partial(self._input_gradient, self._stages[stage], microbatch, version or 0)
            case ins.WeightGradient(stage, microbatch, version):
                return partial(self._weight_gradient, self._stages[stage], microbatch, version or 0)
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
                return partial(self._updater.reduce, stage)
            case ins.ReduceTied(stage):
                return partial(self._updater.reduce_tied, stage)
            case ins.SyncScalars():
                return self._updater.tell
            case ins.Step(_, version):
                return partial(self._step, version)
            case ins.Unshard(stage):
                return self._sharded[stage].unshard if stage in self._sharded else _nothing
            case ins.Reshard(stage):
                return self._sharded[stage].reshard if stage in self._sharded else _nothing
            case _:
                assert_never(instruction)

    def _forward(self, stage: Stage, microbatch: int, version: int, num_left: int) -> None:
        """activation[stage] = stage(activation[stage - 1])."""
        run, index = self._run, stage.index
        microbatch += run.later_microbatches
        of_batch = microbatch - run.first
        received = self._mail.take((True, index, microbatch)) if index else pack_input(run.inputs[of_batch])
        self._started = self._mark()
        if run.loss is not None and index == self.program.num_stages - 1:
            run.loss.await_rows()
        with self._transport.baton, self._seeds:
            stage.weights.use(version + run.later_versions if run.train else None)
            output = stage.forward(microbatch, (run.step, of_batch), received, run.keywords[of_batch], num_left)
            if index < self.program.num_stages - 1:
                self._mail.put((True, index + 1, microbatch), stage.hand_on(microbatch, output))
            elif run.loss is None:
                run.outputs[of_batch] = output
            else:
                with stage.autocasting():
                    loss, gradient = run.loss.of(of_batch, output)
                scale = self._updater.scale_of(self._update_of(microbatch), run.loss, run.step) if run.train else 1.0
                stage.end_with(microbatch, loss, gradient * scale)

    def _backward(self, stage: Stage, microbatch: int, version: int) -> None:
        """dx, dw = gradients at dy; weights.grad += dw."""
        microbatch += self._run.later_microbatches
        dy = self._gradients_for(stage, microbatch)
        with self._transport.baton, self._seeds:
            dx = stage.backward(microbatch, dy, *self._numbers(microbatch, version))
            self._pass_back(stage, microbatch, dx)

    def _input_gradient(self, stage: Stage, microbatch: int, version: int) -> None:
        """dx = gradient at dy."""
        microbatch += self._run.later_microbatches
        dy = self._gradients_for(stage, microbatch)
        with self._transport.baton, self._seeds:
            dx = stage.input_gradient(microbatch, dy, *self._numbers(microbatch, version))
            self._pass_back(stage, microbatch, dx)

    def _weight_gradient(self, stage: Stage, microbatch: int, version: int) -> None:
        """weights.grad += dw."""
        microbatch += self._run.later_microbatches
        with self._transport.baton:
            stage.weight_gradient(microbatch, *self._numbers(microbatch, version))

    def _overlap(self, forward: Action, backward: Action) -> None:
        """A fused pair: one after the other here, with nothing in between."""
        forward()
        started = self._started
        backward()
        self._started = started

    def _step(self, version: int) -> None:
        """weights[version] = optimizer(weights[version - 1], weights.grad)."""
        version += self._run.later_versions
        if self._updater.is_due(version):
            self._started = self._mark()
            with self._transport.baton, self._callers_seeds():
                self._updater.step(version)

    def _numbers(self, microbatch: int, version: int) -> tuple[int, int]:
        """The weight version of a backward, and the update that its weight gradients go into."""
        return version + self._run.later_versions, self._update_of(microbatch)

    def _update_of(self, microbatch: int) -> int:
        return microbatch // self.program.updates.microbatches_per_update + 1

    def _gradients_for(self, stage: Stage, microbatch: int) -> Gradients | None:
        """dy, once it has arrived; None on the last stage, which starts from its loss."""
        if stage.index == self.program.num_stages - 1:
            return None
        letter = self._mail.take((False, stage.index, microbatch))
        self._started = self._mark()
        return unpack_gradients(letter)

    def _pass_back(self, stage: Stage, microbatch: int, dx: Gradients) -> None:
        if stage.index:
            self._mail.put((False, stage.index - 1, microbatch), stage.hand_back(dx))


def _nothing() -> None:
    """Nothing is to be done: the stage is whole."""
