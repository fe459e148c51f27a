"""GPU work: the GPT that the bench of GPUs trains, a plain loop that does so, and the memory that a stage takes."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagewright.bench.gpu_device import Device
from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.value import pack, pack_input
from stagewright.models import GPT, GPTConfig, build_gpt_stage, token_loss


@dataclass(frozen=True)
class Work:
    """What is trained, and where.

    Args:
        config: of the GPT.
        rows: sequences of a microbatch.
        num_microbatches: of a batch.
        device: ``cuda``, the current GPU, or ``cpu``.
        num_rounds, num_steps: how often it is timed, and batches each time.
        dtype: of weights and activations.
    """

    config: GPTConfig
    rows: int
    num_microbatches: int
    device: str
    num_rounds: int
    num_steps: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(GPT(self.config).num_parameters())

    @property
    def num_tokens(self) -> int:
        """Of a batch."""
        return self.num_microbatches * self.rows * self.config.sequence_length

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same for all that train it: random tokens, and those that follow each."""
        shape = (self.num_microbatches * self.rows, self.config.sequence_length + 1)
        tokens = torch.randint(self.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def stage(self, index: int, num_stages: int, device: torch.device) -> nn.Module:
        """A stage of the model, of which there are so many."""
        return build_gpt_stage(self.config, index, num_stages, device=device, dtype=self.dtype)


def adam(parameters: Iterable[tuple[str, nn.Parameter]] | Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One kernel for many parameters."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class PlainLoop:
    """What one writes without any pipeline: the whole model, its microbatches one after the other."""

    def __init__(self, module: nn.Module, num_microbatches: int) -> None:
        self._module = module
        self._num_microbatches = num_microbatches
        self._optimizer = adam(module.parameters())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One batch; its loss."""
        losses = []
        for rows, targets in zip(x.chunk(self._num_microbatches), y.chunk(self._num_microbatches)):
            loss = token_loss(self._module(rows), targets) / self._num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum()


@dataclass(frozen=True, slots=True)
class Kept:
    """The memory that training takes on a stage, in bytes, beyond weights and optimizer.

    Args:
        activation: of a microbatch, from its F to its I, or B.
        weight: of a microbatch, from its F to its W.
        workspace: beyond these, for a moment.
        gradients: of the stage's weights, from the first microbatch to the update.
    """

    activation: int
    weight: int
    workspace: int
    gradients: int


def kept_by(work: Work, module: nn.Module, index: int, num_stages: int, device: Device, splits: bool) -> Kept:
    """Let one microbatch go through a stage outside any pipeline, and look at the memory."""
    stage = Stage(index, module, Seeds(0, device.device), splits_backward=splits)
    is_last = index == num_stages - 1
    width = (work.rows, work.config.sequence_length, work.config.hidden_size)
    dy = None if is_last else [torch.ones(width, dtype=work.dtype, device=device.device)]
    levels: list[int] = []
    for _ in range(2):  # the gradients of the weights come into being in the first
        before = device.allocated
        device.restart_peak()
        _forward(stage, work, width, is_last)
        levels = [device.allocated - before]
        stage.input_gradient(0, dy)
        levels.append(device.allocated - before)
        stage.weight_gradient(0)
        levels += [device.allocated - before, device.peak - before]
    module.zero_grad(set_to_none=True)
    after_forward, after_input, after_weight, peak = levels
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    return Kept(after_forward - after_input, after_input - after_weight, peak - after_forward, gradients)


def _forward(stage: Stage, work: Work, shape: tuple[int, ...], is_last: bool) -> None:
    """F of one microbatch; of what it makes nothing is held here."""
    device = stage.seeds.device
    x, y = (tokens[: work.rows] for tokens in work.batch(device))
    if stage.index == 0:
        received = pack_input(x)
    else:
        received = pack(torch.randn(shape, dtype=work.dtype, device=device, requires_grad=True), "the bench")
    output = stage.forward(0, (0, 0), received, {}, 0)
    if is_last:
        stage.end_with(0, token_loss(output, y), 1.0)
    else:
        stage.hand_on(0, output)
