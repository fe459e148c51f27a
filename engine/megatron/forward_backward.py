"""Megatron: Megatron-LM's ``forward_backward_func`` on any of the schedules here.

A training loop written for Megatron-LM takes ``get_forward_backward_func`` from here and trains as before: arguments
and results mean what they mean in ``megatron.core.pipeline_parallel.schedules``. Of the ``config`` that a chunk may
have, these count: ``calculate_per_token_loss``, ``grad_scale_func``, ``no_sync_func``, ``finalize_model_grads_func``,
``enable_autocast`` and ``autocast_dtype``.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stagewright.engine.batch import PerMicrobatch
from stagewright.engine.launch.context import default_transport
from stagewright.engine.megatron.chunk import Call, Chunk, ForwardStep, Turn, attribute_of
from stagewright.engine.megatron.data import DataIterator, readers_of
from stagewright.engine.pipeline import Pipeline
from stagewright.engine.transport.contract import Transport
from stagewright.engine.value import Value
from stagewright.schedules import Program, Schedule, create, find


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    schedule: str | Schedule | Program | None = None,
    transport: Transport | None = None,
    seed: int = 0,
    dynamic_shapes: bool = False,
    tied: Sequence[Sequence[str]] = (),
    **options: Any,
) -> "ForwardBackward":
    """The function that runs all forwards and backwards of a batch on the stages of this rank.

    Args:
        pp_size, vp_size: ranks of the pipeline and stages a rank, to be checked; both are known without.
        schedule: a name, with the schedule's options by keyword, a Schedule, or a Program. By default 1F1B, or
            interleaved 1F1B where the model comes in several chunks, as in Megatron-LM.
        transport: connects the ranks; by default the default group of torch.distributed.
        seed: from which the random numbers of the stages (dropout) follow.
        dynamic_shapes: on NCCL, tensors that cross ranks may change their shapes from batch to batch.
        tied: groups of names of parameters of the chunks, each group one weight on several stages.
        options: of the schedule.

    Raises:
        ValueError: ``pp_size`` is not the number of ranks, or options come beside a schedule that has its own.
    """
    transport = transport or default_transport()
    if pp_size not in (None, transport.num_ranks):
        raise ValueError(f"the transport connects {transport.num_ranks} ranks: got pp_size={pp_size}; leave it out")
    if options and isinstance(schedule, Schedule | Program):
        raise ValueError(f"a {type(schedule).__name__} has its options already: {sorted(options)} belong to it")
    return ForwardBackward(schedule, transport, vp_size, seed, dynamic_shapes, tied, options)


@dataclass(eq=False)
class ForwardBackward:
    """Runs the batches of a Megatron-style training loop; the arguments are those of ``get_forward_backward_func``."""

    schedule: str | Schedule | Program | None
    transport: Transport
    num_chunks: int | None
    seed: int
    dynamic_shapes: bool
    tied: Sequence[Sequence[str]]
    options: Mapping[str, Any]
    _num_batches: int = field(default=0, init=False)
    _chunks: list[nn.Module] = field(default_factory=list, init=False)
    # By their number of microbatches, all over the same chunks.
    _pipelines: dict[int, Pipeline] = field(default_factory=dict, init=False)

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: DataIterator,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Forward and backward of one batch: gradients are added to ``.grad``, for the trainer to clip and step itself.

        Args:
            forward_step_func: (data iterator, chunk) -> (output, loss_func); called once a microbatch and chunk, after
                the chunk's ``set_input_tensor`` got what the stage before it returned. Where the last stage lives
                ``loss_func(output)`` gives (loss, metrics), and the microbatches' losses are averaged; or (loss,
                num_tokens, metrics), and each loss is divided by its number of tokens, at least 1, first. With
                ``calculate_per_token_loss`` the sum of all losses is divided by the number of all tokens instead.
            data_iterator: read by ``forward_step_func`` alone; a list, one a chunk, where there are several chunks.
            model: this rank's chunk, or a list of them: ``model[c]`` is its c-th stage, see ``stages``.
            num_microbatches: of this batch.
            seq_length, micro_batch_size, decoder_seq_length, adjust_tensor_shapes_fn: not needed, since messages
                tell their shapes.
            forward_only: no backward and no graph; the mode of the modules, training or evaluation, is left as it is.
            collect_non_loss_data: keep what ``loss_func(output, non_loss_data=True)`` returns; needs ``forward_only``.
            first_val_step: whether ``set_is_first_microbatch`` of the chunks is called in validation.
            p2p_communicator: must be None, the transport does its work.
            pg_collection, force_all_reduce: handed to ``finalize_model_grads_func`` where given.

        Returns:
            Where the last stage lives the metrics, detached, one entry a microbatch computed there; elsewhere an empty
            list.

        Raises:
            ScheduleError: the schedule cannot serve so many microbatches.
            ValueError: arguments contradict each other, or a data iterator ends too early.
            TypeError: a chunk or a function does not keep to the contract.
        """
        chunks = list(model) if isinstance(model, Sequence) else [model]
        if num_microbatches < 1:
            raise ValueError(f"a batch has at least one microbatch: got num_microbatches={num_microbatches}")
        if p2p_communicator is not None:
            raise ValueError("the transport connects the ranks: leave p2p_communicator out")
        if collect_non_loss_data and not forward_only:
            raise ValueError("without a loss there is nothing to train: collect_non_loss_data needs forward_only=True")
        pipe = self._pipeline(chunks, num_microbatches, forward_only=forward_only)
        call = Call(
            forward_step_func,
            readers_of(data_iterator, pipe.program, self.transport.rank, forward_only=forward_only),
            attribute_of(chunks[0], "config"),
            num_microbatches,
            self.transport.device,
            forward_only,
            collect_non_loss_data,
            first_val_step,
        )
        self._run(pipe, call)
        call.end()
        if not forward_only:
            self._finalize(chunks, call, pg_collection, force_all_reduce)
        return [call.metrics[microbatch] for microbatch in sorted(call.metrics)]

    def stages(self, num_microbatches: int, num_chunks: int = 1) -> tuple[int, ...]:
        """This rank's stages in the order of its chunks.

        Args:
            num_microbatches, num_chunks: of which the placement may depend.
        """
        return self._planned(num_microbatches, num_chunks).placement.stages_of(self.transport.rank)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of all stages together, after a batch; every rank calls this alike.

        Returns:
            The norm that they had.

        Raises:
            ValueError: there was no batch yet.
        """
        if not self._pipelines:
            raise ValueError("there are no gradients to clip yet: call this after a batch")
        return next(iter(self._pipelines.values())).clip_grad_norm_(max_norm)

    def _run(self, pipe: Pipeline, call: Call) -> None:
        for chunk in pipe.modules.values():
            assert isinstance(chunk, Chunk)
            chunk.begin()
        turns = PerMicrobatch([Turn(call, microbatch) for microbatch in range(call.num_microbatches)])
        # The first stage reads its input by itself; the numbers of the microbatches stand for it.
        x = torch.arange(call.num_microbatches) if 0 in pipe.modules else None
        pipe.num_steps = self._num_batches
        if call.forward_only:
            pipe.predict(x, num_microbatches=call.num_microbatches, turn=turns)
            return
        for name in ("grad_sync_func", "param_sync_func"):
            if call.option(name) is not None:
                raise ValueError(
                    f"gradients and parameters are exchanged after a batch, not in its midst: got config.{name}; turn "
                    "overlap_grad_reduce and overlap_param_gather off"
                )
        self._num_batches += 1
        no_sync = call.option("no_sync_func") or []
        with ExitStack() as stack:
            for context in no_sync if isinstance(no_sync, list) else [no_sync]:
                stack.enter_context(context())
            pipe.forward_backward(x, turn=turns)

    def _finalize(self, chunks: list[nn.Module], call: Call, pg_collection: Any, force_all_reduce: bool) -> None:
        """Let the trainer's own function exchange and divide gradients; without one they are done already."""
        finalize = call.option("finalize_model_grads_func")
        if finalize is None:
            return
        num_tokens = None
        if call.option("calculate_per_token_loss"):
            own = struct.pack("<q", int(call.num_tokens))
            total = sum(struct.unpack("<q", data)[0] for data in self.transport.gather(own))
            num_tokens = torch.tensor(total, dtype=torch.int, device=self.transport.device)
        further = {} if pg_collection is None else {"pg_collection": pg_collection}
        finalize(chunks, num_tokens, **further, **({"force_all_reduce": True} if force_all_reduce else {}))

    def _pipeline(self, chunks: list[nn.Module], num_microbatches: int, *, forward_only: bool) -> Pipeline:
        """The pipeline over these chunks; forwards alone run on that of any number of microbatches."""
        if len(chunks) != len(self._chunks) or any(ours is not theirs for ours, theirs in zip(self._chunks, chunks)):
            self._pipelines.clear()
            self._chunks = chunks
        if forward_only and self._pipelines:
            return next(iter(self._pipelines.values()))
        if num_microbatches not in self._pipelines:
            schedule = self._planned(num_microbatches, len(chunks))
            stages = schedule.placement.stages_of(self.transport.rank)
            if len(stages) != len(chunks):
                raise ValueError(
                    f"model has one chunk for each stage of a rank: got {len(chunks)}, and rank {self.transport.rank} "
                    f"owns the stages {list(stages)}; choose another schedule or other chunks"
                )
            last = schedule.num_stages - 1
            modules = {stage: Chunk(chunk, stage, is_last=stage == last) for stage, chunk in zip(stages, chunks)}
            pipe = Pipeline(
                modules,
                schedule=schedule,
                num_microbatches=None if forward_only else num_microbatches,
                loss_fn=_itself,
                transport=self.transport,
                seed=self.seed,
                dynamic_shapes=self.dynamic_shapes,
                tied=self.tied,
            )
            self._pipelines[pipe.num_microbatches] = pipe
            return pipe
        return self._pipelines[num_microbatches]

    def _planned(self, num_microbatches: int, num_chunks: int) -> Schedule | Program:
        """The schedule of one batch."""
        if self.num_chunks not in (None, num_chunks):
            raise ValueError(f"vp_size is the number of chunks: got vp_size={self.num_chunks} and {num_chunks} chunks")
        schedule = self.schedule or ("interleaved" if num_chunks > 1 else "1f1b")
        if not isinstance(schedule, str):
            return schedule
        options = self.options
        if "num_chunks" in find(schedule).__dataclass_fields__:
            options = {"num_chunks": num_chunks, **options}
        return create(schedule, num_ranks=self.transport.num_ranks, num_microbatches=num_microbatches, **options)


def _itself(loss: Value, target: None) -> Value:
    """The last chunk gives its loss as its output."""
    return loss
