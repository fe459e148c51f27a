"""The bug diary: each test tells a fault that the library once had."""

import pytest
import torch

from stagewright.engine import PeerError, RankContext, RankError, launch_local
from stagewright.engine.transport.contract import Channel
from stagewright.engine.transport.device import _as_bytes
from stagewright.engine.transport.frame import FrameCodec
from stagewright.engine.value import pack
from stagewright.schedules import Program, ScheduleError, simulate, verify
from stagewright.schedules.placement import linear


def test_a_rank_without_work_was_an_index_error() -> None:
    """The communication pass ran before the proof of what is computed, and put a receive before the first row of an
    empty stream."""
    program = Program.from_csv("0F0,0B0\n,", placement=linear(2))
    with pytest.raises(ScheduleError, match="microbatch 0 has no F on stage 1, which is on rank 1"):
        verify(program)


def test_a_step_that_makes_version_0_waited_for_the_last_reduction() -> None:
    """Version - 1 indexed the reductions from behind."""
    text = """0F0,1F1,1B1,0B0,0REDUCE_GRAD,0STEP@0,0REDUCE_GRAD,1REDUCE_GRAD,1STEP@1
1F0,0F1,0B1,1B0,0REDUCE_GRAD,0STEP@1,1REDUCE_GRAD,1STEP@1,0REDUCE_GRAD"""
    assert simulate(Program.from_csv(text)).makespan == 12


def test_updates_and_versions_were_not_looked_at() -> None:
    """Any STEP was legal, even the seventh version of weights that nobody had updated before."""
    program = Program.from_csv("0F0,0B0,0STEP@7")
    with pytest.raises(ScheduleError, match="0STEP@7 .* should make version 1, the one after version 0"):
        verify(program)


@pytest.mark.parametrize("token", ["0F999999999", "999999999F0"])
def test_a_huge_number_in_a_file_took_all_memory(token: str) -> None:
    """Tables were sized by the highest number before anyone asked whether all those below it occur."""
    with pytest.raises(ScheduleError, match="by their highest numbers, but 3 computations"):
        Program.from_csv(f"0F0,0B0,{token}", placement=linear(1))


def test_what_changed_in_place_in_a_message_spoilt_its_other_tensors() -> None:
    """All tensors of a frame were views of it and shared its version counter, so autograd took all of them for changed
    when a stage worked in place on one: over gloo, but not in one process."""
    codec = FrameCodec(torch.device("cpu"))
    frame = codec.write(pack((torch.ones(3), torch.ones(3)), "stage 0"), 1, 0)
    codec.num_bytes(frame, 0)
    first, second = codec.read(frame, 1, 0, 0).tensors
    weight = torch.ones(3, requires_grad=True)
    loss = (second * weight).sum()
    first.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("tensor", [torch.arange(5.0)[3::7], torch.tensor([1 + 2j]).conj()])
def test_some_tensors_could_not_be_sent_from_device_to_device(tensor: torch.Tensor) -> None:
    """One element out of a tensor counts as contiguous with any stride, but torch does not show it as bytes; and a
    conjugate is a flag on memory that still holds the original."""
    expected = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert torch.equal(_as_bytes(tensor).view(tensor.dtype), expected)


def exit_cleanly(context: RankContext) -> None:
    raise SystemExit(0)


def test_a_rank_that_called_exit_ended_the_launcher_with_success() -> None:
    """The error of a rank was raised in the launcher as it was, SystemExit(0) too."""
    with pytest.raises(RankError, match=r"rank 0 ended with SystemExit\(0\)"):
        launch_local(exit_cleanly, 1, backend="threads")


def wait_for_what_never_comes(context: RankContext) -> None:
    if context.rank == 0:
        context.transport.post(Channel(1, 0, "gradient"), 0, 0).wait()


def test_a_thread_that_waited_for_a_rank_that_had_returned_hung() -> None:
    """Only a failure woke it, and returning is none."""
    with pytest.raises(PeerError, match="rank 1 has returned"):
        launch_local(wait_for_what_never_comes, 2, backend="threads")
