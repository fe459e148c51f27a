"""Megatron's chunk: one stage of a Megatron-style model, driven by ``set_input_tensor`` and ``forward_step_func``."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stagewright.engine.megatron.data import Picker, Reader
from stagewright.engine.value import Value

# (data iterator, chunk) -> (output, loss_func)
ForwardStep: TypeAlias = Callable[[Any, nn.Module], tuple[Any, Callable[..., Any] | None]]


class Chunk(nn.Module):
    """A stage whose forward is a call of ``forward_step_func``; the last one gives its loss.

    Args:
        chunk: the trainer's module.
        stage: which stage it is.
        is_last: whether that is the last one.

    Raises:
        TypeError: the module has no ``set_input_tensor``.
    """

    def __init__(self, chunk: nn.Module, stage: int, *, is_last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self.stage = stage
        self.is_last = is_last
        self._set_input_tensor = attribute_of(chunk, "set_input_tensor")
        if self._set_input_tensor is None:
            raise TypeError(
                f"a chunk of a Megatron-style model gets its input by set_input_tensor([input]): stage {stage}, "
                f"{type(chunk).__name__}, has no such method"
            )

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as the trainer knows them."""
        return self.chunk.named_parameters(*arguments, **keywords)

    def begin(self) -> None:
        """A call of the forward-backward function starts."""
        self._is_first = True
        self._modes = [(module, module.training) for module in self.chunk.modules()]

    def forward(self, received: Value, *, turn: "Turn") -> Value:
        """One microbatch: the output, of the last stage the loss."""
        for module, mode in self._modes:
            module.training = mode  # the pipeline evaluates in evaluation mode; in Megatron-LM the trainer sets modes
        if self._is_first and turn.call.tells_first:
            set_is_first_microbatch = attribute_of(self.chunk, "set_is_first_microbatch")
            if set_is_first_microbatch is not None:
                set_is_first_microbatch()
        self._is_first = False
        if self.stage == 0:
            received = None
        self._set_input_tensor(received if isinstance(received, list) else [received])
        output, loss_func = turn.call.step(self.chunk, self.stage, turn.microbatch)
        return turn.call.finish(turn.microbatch, output, loss_func) if self.is_last else output


@dataclass(frozen=True)
class Turn:
    """One microbatch of a call."""

    call: "Call"
    microbatch: int


@dataclass
class Call:
    """One batch as the chunks of a rank see it, and what they bring forth beside gradients.

    Args:
        forward_step_func: the trainer's.
        readers: what it gets its data from, for each stage of this rank.
        config: of the model, or None.
        num_microbatches: of the batch.
        device: of this rank.
        forward_only, collect_non_loss_data, first_val_step: as for ``ForwardBackward``.
    """

    forward_step_func: ForwardStep
    readers: Mapping[int, Reader]
    config: Any
    num_microbatches: int
    device: torch.device
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    metrics: dict[int, Any] = field(default_factory=dict, init=False)
    num_tokens: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64), init=False)

    def option(self, name: str) -> Any:
        """What the model's config says; None where it says nothing."""
        return getattr(self.config, name, None)

    @property
    def tells_first(self) -> bool:
        """Whether chunks are told of their first microbatch: in validation only of the first step's."""
        return not self.forward_only or self.first_val_step is None or self.first_val_step

    def step(self, chunk: nn.Module, stage: int, microbatch: int) -> tuple[Any, Callable[..., Any] | None]:
        """(output, loss_func) of one microbatch on one chunk."""
        reader = self.readers[stage]
        if isinstance(reader, Picker):
            reader.pick(microbatch)
        try:
            with self._autocast():
                result = self.forward_step_func(reader, chunk)
        except StopIteration as error:
            raise ValueError(
                f"every data iterator has the data of a whole batch, here of num_microbatches={self.num_microbatches}: "
                f"that of stage {stage} ended at microbatch {microbatch}; give more data or fewer microbatches"
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"forward_step_func returns (output, loss_func): got {_described(result)}")
        return result

    def finish(self, microbatch: int, output: Value, loss_func: Callable[..., Any] | None) -> Value:
        """Keep a microbatch's metrics and give what is trained; the pipeline takes the mean over microbatches."""
        if loss_func is None or self.collect_non_loss_data:
            if not self.forward_only:
                raise TypeError("training needs a loss: forward_step_func returned (output, None) on the last stage")
            self.metrics[microbatch] = _detached(output if loss_func is None else loss_func(output, non_loss_data=True))
            return None
        result = loss_func(output)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise TypeError(
                f"loss_func returns (loss, metrics) or (loss, num_tokens, metrics): got {_described(result)}"
            )
        loss, *num_tokens, metrics = result
        self.metrics[microbatch] = _detached(metrics)
        if self.forward_only:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the loss is a tensor of one number: loss_func returned {_described(loss)}")
        scale = self.option("grad_scale_func")
        loss = loss.reshape(()) if scale is None else scale(loss.reshape(()))
        if self.option("calculate_per_token_loss"):
            return self._summed(loss, num_tokens)
        return loss / _count(num_tokens[0], loss).clamp(min=1) if num_tokens else loss

    def end(self) -> None:
        """All microbatches are through."""
        for reader in self.readers.values():
            if isinstance(reader, Picker):
                reader.end_batch()

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.option("enable_autocast"):
            return nullcontext()
        return torch.autocast(self.device.type, self.option("autocast_dtype"))

    def _summed(self, loss: Tensor, num_tokens: list[Tensor | int]) -> Value:
        """The sum of losses of a microbatch, for the mean over all tokens of the batch."""
        if not num_tokens:
            raise TypeError(
                "with calculate_per_token_loss, loss_func returns (sum of losses, num_tokens, metrics): got 2 values"
            )
        count = _count(num_tokens[0], loss)
        self.num_tokens = self.num_tokens.to(count) + count
        if self.option("finalize_model_grads_func") is None:
            return loss, count
        return loss * self.num_microbatches  # that function divides the plain sum of all losses itself


def attribute_of(chunk: nn.Module, name: str) -> Any:
    """An attribute of a chunk, or of what it wraps as ``module``; None where there is none."""
    module: Any = chunk
    while not hasattr(module, name) and hasattr(module, "module"):
        module = module.module
    return getattr(module, name, None)


def _count(num_tokens: Tensor | int, loss: Tensor) -> Tensor:
    return torch.as_tensor(num_tokens, device=loss.device).detach().reshape(())


def _detached(value: Any) -> Any:
    """Metrics without their graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) is dict:
        return {key: _detached(member) for key, member in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(_detached(member) for member in value)
    return value


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
