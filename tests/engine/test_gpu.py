"""On GPUs: over NCCL and through pinned host memory the result is that of the plain loop on the CPU."""

from typing import Any

import pytest
import torch
from nccl_double import transports_on_double
from on_gpu import peak_bytes, train_on_gpu, train_without_waiting
from plain import Result, train_plainly

from stagewright.engine import launch_local
from stagewright.engine.transport.contract import Channel, Session
from stagewright.engine.transport.device import DeviceTransport
from stagewright.engine.transport.hub import Hub
from stagewright.engine.value import pack, unpack
from stagewright.schedules import create

pytestmark = pytest.mark.gpu

NUM_GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU: torch finds none")
needs_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs for NCCL: torch finds {NUM_GPUS}")
STEPS = 3
TOLERANCE = 1e-10


def assert_close(results: list[Result], plain: Result) -> None:
    """As in the other tests, but sums are added in another order on a GPU."""
    for result in results:
        assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE)
        for ours, theirs in ((result.weights, plain.weights), (result.gradients, plain.gradients)):
            for key, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[key], rtol=TOLERANCE, atol=TOLERANCE, msg=str(key))
        if result.outputs is not None:
            torch.testing.assert_close(result.outputs, plain.outputs, rtol=TOLERANCE, atol=TOLERANCE)
    assert {key for result in results for key in result.weights} == set(plain.weights)


@needs_gpus
@pytest.mark.parametrize("dynamic_shapes", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev", "chimera"])
def test_over_nccl_a_pipeline_trains_as_a_plain_loop_does(name: str, dynamic_shapes: bool) -> None:
    num_ranks = NUM_GPUS - NUM_GPUS % 2 if NUM_GPUS < 4 else 4
    schedule = create(name, num_ranks=num_ranks, num_microbatches=8)
    options = {"schedule": schedule, "dynamic_shapes": dynamic_shapes}
    results = launch_local(train_on_gpu, num_ranks, args=("nccl", STEPS, options))
    assert_close(results, train_plainly(schedule.num_stages, 17, STEPS))


@needs_gpus
def test_over_nccl_memory_is_bounded_by_what_is_in_flight_and_not_by_m() -> None:
    few, many = (launch_local(peak_bytes, 2, args=(count,)) for count in (8, 64))
    for of_few, of_many in zip(few, many):
        assert of_many <= 1.1 * of_few


@needs_gpus
def test_over_nccl_the_host_never_waits_for_its_gpu_within_a_step() -> None:
    launch_local(train_without_waiting, 2)


@needs_gpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera"])
def test_ranks_that_share_a_gpu_train_as_a_plain_loop_does(name: str) -> None:
    schedule = create(name, num_ranks=2, num_microbatches=8)
    results = launch_local(train_on_gpu, 2, args=("shared", STEPS, {"schedule": schedule}))
    assert_close(results, train_plainly(schedule.num_stages, 17, STEPS))


@needs_gpu
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor(2**62 + 1),
        [torch.ones(2, dtype=torch.bfloat16), None, torch.empty(0, 3), torch.tensor([True])],
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_values_on_a_gpu_arrive(value: Any) -> None:
    hub = Hub(2)
    source, destination = (
        DeviceTransport(transport._host, transport._connect, torch.device("cuda", 0))
        for transport in transports_on_double(hub)
    )
    channel = Channel(0, 1, "activation")
    for transport in (source, destination):
        transport.open([channel])
        transport.begin(Session(fixed_shapes=True))
    packed = pack(value, "stage 0")
    on_gpu = pack(unpack(packed.layout.skeleton, [tensor.cuda() for tensor in packed.tensors]), "stage 0")
    source.send(channel, on_gpu, 1, 0)
    received = destination.post(channel, 1, 0).wait()
    assert all(tensor.is_cuda for tensor in received.tensors)
    back = unpack(received.layout.skeleton, [tensor.cpu() for tensor in received.tensors])
    torch.testing.assert_close(back, value, rtol=0, atol=0)
