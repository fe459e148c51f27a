"""Training on GPUs; functions that processes can import."""

from dataclasses import replace
from typing import Any, Literal

import torch
from plain import Result, make_batch, make_stage, momentum, note_parameters, squared_error

from stagewright.engine import Pipeline, RankContext
from stagewright.engine.transport.contract import Transport
from stagewright.engine.transport.gloo import GlooTransport
from stagewright.engine.transport.nccl import nccl_transport


def transport_of(context: RankContext, kind: Literal["nccl", "shared"]) -> Transport:
    """Over NCCL, a GPU a rank; or all ranks on the first GPU, through pinned host memory."""
    device = torch.device("cuda", context.rank if kind == "nccl" else 0)
    torch.cuda.set_device(device)
    return nccl_transport(device) if kind == "nccl" else GlooTransport(device=device)


def train_on_gpu(context: RankContext, kind: Literal["nccl", "shared"], steps: int, options: dict[str, Any]) -> Result:
    """One rank's share of the training, brought back to the host."""
    transport = transport_of(context, kind)
    result = Result()
    with Pipeline(
        make_stage, loss_fn=squared_error, optimizer=momentum, transport=transport, share_loss=True, **options
    ) as pipe:
        for step in range(steps):
            x, y = make_batch(17, step)
            loss = pipe.train_step(x.to(transport.device), y.to(transport.device))
            assert loss is not None
            result.losses.append(loss.item())
        x, y = make_batch(17, steps)
        pipe.forward_backward(x.to(transport.device), y.to(transport.device))
        note_parameters(result, pipe.modules)
        result.outputs = pipe.predict(make_batch(17, 99)[0].to(transport.device))
    return replace(
        result,
        gradients={key: gradient.cpu() for key, gradient in result.gradients.items()},
        weights={key: weight.cpu() for key, weight in result.weights.items()},
        outputs=None if result.outputs is None else result.outputs.cpu(),
    )


def peak_bytes(context: RankContext, num_microbatches: int) -> int:
    """The most memory that is allocated on a rank's GPU in a step, beyond what is allocated before it."""
    transport = transport_of(context, "nccl")
    batch = [tensor.to(transport.device) for tensor in make_batch(8 * num_microbatches, 0, width=256)]
    with Pipeline(
        lambda stage: make_stage(stage, width=256),
        schedule="1f1b",
        num_microbatches=num_microbatches,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=transport,
    ) as pipe:
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pipe.train_step(*batch)
            torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def train_without_waiting(context: RankContext) -> None:
    """From the third step on, whatever makes the host wait for its GPU raises."""
    transport = transport_of(context, "nccl")
    batch = [tensor.to(transport.device) for tensor in make_batch(16, 0)]
    with Pipeline(
        make_stage,
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=squared_error,
        optimizer=momentum,
        transport=transport,
    ) as pipe:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            pipe.train_step(*batch)
        torch.cuda.set_sync_debug_mode("default")
