"""Pipeline: what a trainer holds; a model cut into stages that trains by a schedule."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from torch import Tensor

from stagewright.engine.assembly import BuildStage, Options, assemble
from stagewright.engine.batch import join
from stagewright.engine.control.timeout import watch
from stagewright.engine.evaluation import Evaluation
from stagewright.engine.feed import Feed
from stagewright.engine.loss import BatchLoss, LossFunction
from stagewright.engine.means import Means, of_all_replicas, together
from stagewright.engine.mesh import Mesh, connect
from stagewright.engine.plan import OnNan, Recompute, plan_of
from stagewright.engine.rank_view import RankView
from stagewright.engine.roll_call import RollCall
from stagewright.engine.run import Run
from stagewright.engine.staleness import Remedy
from stagewright.engine.state import load_state, state_of
from stagewright.engine.training import training_of
from stagewright.engine.transport.contract import Session, Transport
from stagewright.engine.updates.optimizers import OptimizerFactory
from stagewright.engine.value import Value
from stagewright.schedules import Program, Schedule


class Pipeline(RankView):
    """A model cut into stages that trains over several ranks by a schedule.

    Every rank makes its own ``Pipeline`` with the same arguments and calls the same methods in the same order.

    Args:
        build_stage: stage index -> module, called for the stages of this rank alone; or a dict with those stages.
        schedule: a name with ``num_microbatches`` and the schedule's options by keyword, a Schedule, or a Program.
        num_microbatches: microbatches of one batch.
        loss_fn: (output of the last stage, target) -> mean over the rows of a microbatch; or (sum, count), such as of
            tokens. A dict of metrics may come behind either: their means over the batch are then in ``metrics``.
        optimizer: (name, parameter) pairs -> optimizer, for the parameters of this rank that are trained when this is
            built (what is frozen then stays so), and called only if there are any; None where the trainer steps itself
            after ``forward_backward``. Names are those within a stage, so that rules by name mean the same under every
            schedule; two stages of a rank may have the same ones.
        transport: connects the ranks; by default the default group of torch.distributed.
        mesh: in the place of a transport, a DeviceMesh, or what ``make_mesh`` gives: the ranks of its dimension ``pp``
            are the pipeline's, and along ``dp`` there are replicas, which train together. Each feeds a batch of its
            own, of any number of rows; loss, gradients and weights are those of all of these rows as one batch.
            Initial weights are the first replica's.
        seed: from which the random numbers of the stages (dropout) follow.
        share_loss: give the loss to every rank, not only to where the last stage lives; each step then waits for that.
        recompute: ``"off"``; ``"full"``: every forward keeps only its input and runs again in its backward; a number
            k: so do all but the last k microbatches of a batch that it computes here; or a dict, stage by stage.
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
        on_nan: when the loss of a microbatch is NaN or infinite, ``"raise"`` a ``NotFiniteError`` on every rank before
            any weight changes, or ``"skip"`` the update on all, as ``skipped`` then tells; by default nobody looks.
        timeout: seconds without progress after which a rank that waits finds out which rank keeps it waiting, and all
            end with an error that names that one; that of the process group where left out, else half an hour. It must
            be longer than whatever a rank does alone, such as writing a checkpoint while the others wait.
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
        mesh: Mesh | None = None,
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
        on_nan: OnNan | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        connection, group = connect(mesh, transport)
        watch(connection, group, timeout)
        with RollCall(connection, group) as roll_call:
            program, asynchronous = plan_of(schedule, connection.num_ranks, num_microbatches, options)
            chosen = Options(
                optimizer=optimizer,
                seed=seed,
                recompute=recompute,
                tied=tied,
                max_norm=max_norm,
                autocast=autocast,
                master_weights=master_weights,
                loss_scale=loss_scale,
                loss_counts=loss_counts,
                deferred_batch_norm=deferred_batch_norm,
                staleness=staleness,
                on_nan=on_nan,
            )
            roll_call.answer(schedule, options, program, asynchronous, chosen, share_loss, dynamic_shapes)
        self._mesh = mesh
        self._num_microbatches = program.num_microbatches
        self._placement = program.placement
        self._share_loss = share_loss
        super().__init__(assemble(build_stage, program, connection, group, chosen))
        self._training = training_of(
            program, asynchronous, self._assembly, scalars=chosen.scalars, fixed_shapes=not dynamic_shapes
        )
        self._evaluation = Evaluation(program.placement, self._assembly)
        self._feed = Feed(self._assembly, program.num_stages, loss_fn, split_spec or {}, self._training)

    @property
    def program(self) -> Program:
        """What this rank and all others run for a batch; some batches and a drain where there is no flush."""
        return self._training.program()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of all stages together, each weight counted once, and return the norm that they had; every
        rank calls this alike.
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
            The batch's loss where the last stage lives (everywhere with ``share_loss``), else None. With replicas that
            is the loss of all their batches as one.

        Raises:
            ValueError: there is no optimizer.
        """
        if not self._updater.can_step:
            raise ValueError(
                "train_step makes an update: give the Pipeline an optimizer, or call forward_backward and step yourself"
            )
        return self._train(True, x, y, keywords)

    def forward_backward(self, x: Value = None, y: Value = None, **keywords: Value) -> Tensor | None:
        """One batch without the update: gradients are added to ``.grad``, for the trainer to clip and step itself.

        With replicas each call sums its own gradients over them, so what adds up is the same on all.
        """
        return self._train(False, x, y, keywords)

    def eval_step(
        self, x: Value = None, y: Value = None, *, num_microbatches: int | None = None, **keywords: Value
    ) -> Tensor | None:
        """The loss of a batch, or of those of all replicas, in evaluation mode; gradients and random state stay.

        Args:
            x, y, keywords: as for ``train_step``.
            num_microbatches: any number; the schedule's where left out.
        """
        count = num_microbatches or self.num_microbatches
        loss = self._feed.loss(x, y, count)
        self._evaluate(x, loss, count, keywords)
        return self._shared(loss.means())

    def predict(self, x: Value = None, *, num_microbatches: int | None = None, **keywords: Value) -> Value:
        """The last stage's output for a batch of this replica in evaluation mode, where that stage lives; else None."""
        count = num_microbatches or self.num_microbatches
        outputs = self._evaluate(x, None, count, keywords).outputs
        return join([outputs[microbatch] for microbatch in range(count)]) if outputs else None

    def flush(self) -> None:
        """Do the backwards and updates that are left; none are, after a step of a synchronous schedule."""
        self._training.drain(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """This rank's weights by stage, with their masters, its optimizer's state, the loss scale, and how many steps
        were made; a tensor is the very one that is trained, as in the state of a module.
        """
        self.flush()
        return state_of(self._assembly, self._training, self.num_steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned on the same rank of the same shape.

        Raises:
            ValueError: it belongs to other stages, or to other masters.
        """
        self.num_steps = load_state(self._assembly, self._training, state, self.num_steps)

    def close(self) -> None:
        """Release the transport; what is in flight is lost, unless ``flush`` was called before."""
        self._transport.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush, unless the block has failed, and close."""
        with closing(self):
            if kind is None:
                self.flush()

    def _train(self, updates: bool, x: Value, y: Value, keywords: Mapping[str, Value]) -> Tensor | None:
        loss = self._feed.loss(x, y, self.num_microbatches)
        run = self._feed.run(self.num_steps, x, keywords, self.num_microbatches, loss, train=True)
        with self._assembly.norms:
            self._history.add(self._training.train(run, updates=updates), run)
        loss.warn_if_detached(self.num_steps)
        self.num_steps += 1
        self._transport.progress.num_batches = self.num_steps
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
        means = of_all_replicas(means, self._group, self.rank, owners)
        means = together(means, self._assembly.agreement, owners, readers)
        self.metrics = {name: metric.mean for name, metric in means.metrics.items()}
        return None if means.loss is None else means.loss.mean
