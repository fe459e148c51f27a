"""Pipeline: what a trainer holds; a model cut into stages that trains by a schedule."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.engine.assembly import BuildStage, Options, assemble
from stagewright.engine.batch import join
from stagewright.engine.context import default_transport
from stagewright.engine.evaluation import Evaluation
from stagewright.engine.feed import Feed
from stagewright.engine.loss import BatchLoss, LossFunction, Means, together
from stagewright.engine.optimizers import OptimizerFactory, named_weights
from stagewright.engine.plan import Recompute, plan_of, windows_of
from stagewright.engine.run import Run
from stagewright.engine.staleness import Remedy
from stagewright.engine.synchronous import SynchronousTraining
from stagewright.engine.trace import gather_timeline
from stagewright.engine.transport.contract import Session, Transport
from stagewright.engine.value import Value
from stagewright.engine.weights import load_masters
from stagewright.engine.windowed import WindowedTraining
from stagewright.schedules import Program, Schedule, Timeline


class Pipeline:
    """A model cut into stages that trains over several ranks by a schedule.

    Every rank makes its own ``Pipeline`` with the same arguments and calls the same methods in the same order.

    Args:
        build_stage: stage index -> module, called for the stages of this rank alone; or a dict with those stages.
        schedule: a name with ``num_microbatches`` and the schedule's options by keyword, a Schedule, or a Program.
        num_microbatches: microbatches of one batch.
        loss_fn: (output of the last stage, target) -> mean over the rows of a microbatch; or (sum, count), such as of
            tokens. A dict of metrics may come behind either: their means over the batch are then in ``metrics``.
        optimizer: (name, parameter) pairs -> optimizer, for the parameters of this rank that are trained when this is
            built, and called only if there are any; None where the trainer steps by itself after ``forward_backward``.
        transport: connects the ranks; by default the default group of torch.distributed.
        seed: from which the random numbers of the stages (dropout) follow.
        share_loss: give the loss to every rank, not only to where the last stage lives; each step then waits for that.
        recompute: ``"off"``; ``"full"``: every forward keeps only its input and runs again in its backward; a number
            k: so do all but the last k microbatches of a batch; or a dict that says so stage by stage.
        split_spec: for keyword arguments of the steps: name -> the dimension to cut, or None to give it whole.
        dynamic_shapes: on NCCL, tensors that cross ranks may change their shapes from step to step (elsewhere they
            always may); each message then announces its layout from host to host.
        tied: groups of parameter names, each group one weight, such as ``[["embedding.weight", "head.weight"]]``; on
            whatever stages they are, gradients are summed and the copies stay equal, as long as the optimizer treats
            them alike. ``"stage2.weight"`` is the parameter ``weight`` of stage 2 alone.
        max_norm: clip the gradients of all stages together to this norm; ``grad_norm`` reports what it was.
        autocast: dtype in which stages and loss compute what can be computed in low precision.
        master_weights: keep fp32 copies of fp16 and bf16 parameters for the optimizer, and add gradients up in fp32;
            these copies, with their ``.grad``, are then what ``named_parameters`` gives.
        loss_scale: multiply losses by this before the backward, or ``"dynamic"``: by a factor that halves on every
            rank when a gradient overflows anywhere, in which case the update is skipped.
        loss_counts: an asynchronous schedule must know beforehand that the loss comes as (sum, count).
        deferred_batch_norm: update the running statistics of batch norms once a batch, with the mean and variance of
            all its rows, and not with each microbatch in turn. Either way a batch norm normalises each microbatch by
            the microbatch's own mean and variance.
        staleness: remedies for gradients of old weights, such as ``ErrorFeedback()`` (see ``engine.staleness``); where
            a schedule has no such gradients they change nothing.
        options: of the schedule.

    Raises:
        ScheduleError: the schedule cannot serve this shape, or cannot be run.
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        build_stage: BuildStage,
        *,
        schedule: str | Schedule | Program = "1f1b",
        num_microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        transport: Transport | None = None,
        seed: int = 0,
        share_loss: bool = False,
        recompute: Recompute | Mapping[int, Recompute] = "off",
        split_spec: Mapping[str, int | None] | None = None,
        dynamic_shapes: bool = False,
        tied: Sequence[Sequence[str]] = (),
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        master_weights: bool = False,
        loss_scale: float | Literal["dynamic"] | None = None,
        loss_counts: bool = False,
        deferred_batch_norm: bool = False,
        staleness: Remedy | Sequence[Remedy] = (),
        **options: Any,
    ) -> None:
        self._transport = transport or default_transport()
        program, asynchronous = plan_of(schedule, self._transport.num_ranks, num_microbatches, options)
        self.num_microbatches = program.num_microbatches
        self.num_steps = 0
        self.metrics: dict[str, Tensor] = {}
        self._placement = program.placement
        self._share_loss = share_loss
        chosen = Options(
            optimizer=optimizer,
            seed=seed,
            recompute=recompute,
            tied=tied,
            max_norm=max_norm,
            autocast=autocast,
            master_weights=master_weights,
            loss_scale=loss_scale,
            deferred_batch_norm=deferred_batch_norm,
            staleness=staleness,
        )
        self._assembly = assemble(build_stage, program, self._transport, chosen)
        self._stages = self._assembly.stages
        self._updater = self._assembly.updater
        self._training: SynchronousTraining | WindowedTraining
        if asynchronous is None:
            self._training = SynchronousTraining(program, self._assembly, fixed_shapes=not dynamic_shapes)
        else:
            scalars = max_norm is not None or loss_scale is not None or loss_counts
            windows = windows_of(asynchronous, self._assembly.ties.stages, scalars=scalars)
            self._training = WindowedTraining(windows, self._assembly, fixed_shapes=not dynamic_shapes)
        self._evaluation = Evaluation(program.placement, self._assembly)
        self._feed = Feed(
            self.rank,
            self._stages,
            program.num_stages,
            loss_fn,
            split_spec or {},
            per_update=self._training.microbatches_per_update,
            allows_counts=self._training.allows_counts,
        )
        self._last_run: tuple[Program, Run] | None = None

    @property
    def program(self) -> Program:
        """What this rank and all others run for a batch; some batches and a drain where there is no flush."""
        return self._training.program()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of this rank's parameters, or None where it trains none."""
        return self._updater.optimizer

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's modules by stage."""
        return {index: stage.module for index, stage in self._stages.items()}

    @property
    def grad_norm(self) -> float | None:
        """The norm of all stages' gradients in the last update, before clipping; None where nothing asked for it.

        Without a flush between batches that update may be of an earlier batch than the last one.
        """
        return self._updater.grad_norm

    @property
    def overflowed(self) -> bool:
        """Whether the gradients of the last batch overflowed on any rank, so that they were dropped on all.

        With a ``loss_scale`` only. ``train_step`` has left weights and optimizer as they were. ``forward_backward`` has
        added nothing to ``.grad``: a trainer that steps by itself drops what it had accumulated, or repeats the batch.
        """
        return self._updater.overflowed

    @property
    def loss_scale(self) -> float:
        """By what losses are multiplied now."""
        return self._updater.scale

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what this rank trains; a name that occurs in two stages gets its stage in front."""
        return iter(named_weights(self._assembly.weights))

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of all stages together, each weight counted once; every rank calls this alike.

        Returns:
            The norm that they had.
        """
        self._training.refuse_to_stop()
        self._transport.begin(Session(fixed_shapes=False))
        norm = self._updater.clip(max_norm)
        self._transport.end()
        return norm

    def train_step(self, x: Value = None, y: Value = None, **keywords: Value) -> Tensor | None:
        """One batch: forwards, backwards and one optimizer update.

        Without a flush between batches some of the backwards are left for later calls, and with them the update; it has
        the learning rate that was set when its batch was given.

        Args:
            x: the batch's input, rows first; read on ranks that own the first stage.
            y: its target; read where the last stage lives.
            keywords: further arguments of this rank's stages, cut into microbatches too (see ``split_spec``).

        Returns:
            The batch's loss where the last stage lives (everywhere with ``share_loss``), else None.

        Raises:
            ValueError: there is no optimizer.
        """
        if not self._updater.can_step:
            raise ValueError(
                "train_step makes an update: give the Pipeline an optimizer, or call forward_backward and step yourself"
            )
        return self._train(True, x, y, keywords)

    def forward_backward(self, x: Value = None, y: Value = None, **keywords: Value) -> Tensor | None:
        """One batch without the update: gradients are added to ``.grad``, for the trainer to clip and step itself."""
        return self._train(False, x, y, keywords)

    def eval_step(
        self, x: Value = None, y: Value = None, *, num_microbatches: int | None = None, **keywords: Value
    ) -> Tensor | None:
        """The loss of a batch in evaluation mode; touches neither gradients nor random state.

        Args:
            x, y, keywords: as for ``train_step``.
            num_microbatches: any number; the schedule's where left out.
        """
        count = num_microbatches or self.num_microbatches
        loss = self._feed.loss(x, y, count)
        self._evaluate(x, loss, count, keywords)
        return self._shared(loss.means())

    def predict(self, x: Value = None, *, num_microbatches: int | None = None, **keywords: Value) -> Value:
        """The last stage's output for a batch in evaluation mode, where the last stage lives; else None."""
        count = num_microbatches or self.num_microbatches
        outputs = self._evaluate(x, None, count, keywords).outputs
        return join([outputs[microbatch] for microbatch in range(count)]) if outputs else None

    def flush(self) -> None:
        """Do the backwards and updates that are left; none are, after a step of a synchronous schedule."""
        self._training.drain(self.num_steps)

    def trace(self) -> Timeline:
        """When each instruction of the last training step ran, on all ranks, in seconds; every rank calls this alike.

        Where there is no flush, microbatches and versions have the numbers of an early batch.

        Raises:
            ValueError: there was no training step yet.
        """
        if self._last_run is None:
            raise ValueError("there is nothing to show yet: call train_step first")
        program, run = self._last_run
        return gather_timeline(program, run.times, self._transport)

    def state_dict(self) -> dict[str, Any]:
        """This rank's weights by stage, with their masters, its optimizer's state, the loss scale, and how many steps
        were made; a tensor is the very one that is trained, as in the state of a module.
        """
        self.flush()
        masters = {}
        for stage, weights in self._assembly.weights.items():
            weights.use(None)
            weights.publish()
            masters[stage] = {name: master.detach() for name, (_, master) in weights.masters.items()}
        modules = {stage: module.state_dict() for stage, module in self.modules.items()}
        return {
            "stages": modules,
            "masters": masters,
            "training": self._training.state_dict(),
            "num_steps": self.num_steps,
            **self._updater.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned on the same rank of the same shape.

        Raises:
            ValueError: it belongs to other stages, or to other masters.
        """
        if set(state["stages"]) != set(self._stages):
            raise ValueError(f"this rank owns the stages {list(self._stages)}: the state has {sorted(state['stages'])}")
        self._training.settle(self.num_steps)
        for stage, weights in state["stages"].items():
            self._assembly.weights[stage].use(None)
            self._stages[stage].module.load_state_dict(weights)
            load_masters(self._assembly.weights[stage], state.get("masters", {}).get(stage, {}), stage)
        self._updater.load_state_dict(state)
        self._training.load_state_dict(state.get("training", {}))
        self.num_steps = state["num_steps"]

    def close(self) -> None:
        """Release the transport; what is in flight is lost, unless ``flush`` was called before."""
        self._transport.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush, unless the block has failed, and close."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _train(self, updates: bool, x: Value, y: Value, keywords: Mapping[str, Value]) -> Tensor | None:
        count = self.num_microbatches
        loss = self._feed.loss(x, y, count)
        run = self._feed.run(self.num_steps, x, keywords, count, loss, train=True)
        with self._assembly.norms:
            self._last_run = (self._training.train(run, updates=updates), run)
        self.num_steps += 1
        return self._shared(loss.means())

    def _evaluate(self, x: Value, loss: BatchLoss | None, count: int, keywords: Mapping[str, Value]) -> Run:
        self.flush()
        run = self._feed.run(self.num_steps, x, keywords, count, loss, train=False)
        self._evaluation.run(run)
        return run

    def _shared(self, means: Means) -> Tensor | None:
        """The batch's loss, with its metrics: on all ranks if so wanted, else wherever the last stage lives."""
        owners = self._placement.replicas_of(self._placement.num_stages - 1)
        readers = range(self._transport.num_ranks) if self._share_loss else owners
        if len(readers) > 1:
            means = together(means, self._assembly.agreement, owners, readers)
        self.metrics = {name: value for name in means.values if (value := means.mean(name)) is not None}
        return self.metrics.pop("loss", None)
