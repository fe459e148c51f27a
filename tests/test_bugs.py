"""The bug diary: each test tells a fault that the library once had."""

import errno
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from breaking import fail_with_receives_posted
from launched import free_port
from launching import launch_on
from meshes import use_mesh_of
from mismatched import train_to_the_end_of_the_data
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import HashStore
from unlike import try_to_train

from stagewright.cli.cutting import read_profile
from stagewright.cli.main import main
from stagewright.cli.metrics import MetricsError, StepMetrics
from stagewright.cli.report import JsonLines
from stagewright.engine import PeerError, Pipeline, RankContext, RankError, launch_local, read_state_dict
from stagewright.engine.batch import join, split_keywords
from stagewright.engine.checkpoint.files import Files, Part, Written
from stagewright.engine.checkpoint.index import Index, read_index
from stagewright.engine.checkpoint.source import Source
from stagewright.engine.errors import described
from stagewright.engine.launch.environment import started_rank
from stagewright.engine.launch.nodelist import first_node
from stagewright.engine.launch.rounds import enter_round
from stagewright.engine.transport.contract import Channel, Session
from stagewright.engine.transport.device import DeviceTransport, _as_bytes
from stagewright.engine.transport.frame import FrameCodec
from stagewright.engine.transport.hub import Hub
from stagewright.engine.transport.threads import ThreadTransport
from stagewright.engine.updates.optimizers import Plans
from stagewright.engine.value import check_crossing, pack
from stagewright.engine.writing import read_layout
from stagewright.models import (
    GPT,
    GPTConfig,
    cut_by_counts,
    cut_by_layout,
    cut_by_profile,
    cut_sequential,
    measure_profile,
)
from stagewright.models.cut import parts_of_transformer
from stagewright.schedules import Costs, Program, ScheduleError, Timeline, create, simulate, verify
from stagewright.schedules.asynchronous import AsynchronousSchedule
from stagewright.schedules.fitting import mean_costs
from stagewright.schedules.placement import linear
from stagewright.schedules.table import BACKWARD
from stagewright.schedules.windows import Windows

CPU = torch.device("cpu")


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
    codec.num_bytes(frame.numpy().data, 0)
    first, second = codec.read(frame.numpy().data, 1, 0, 0).tensors
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


def gradients_of(module: nn.Module, **options: Any) -> list[Tensor | None]:
    """What one batch of 8 rows in 4 microbatches leaves on a single stage."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6)
    options = {"schedule": "zb-h1", "num_microbatches": 4, "loss_fn": lambda y, target: (y**2).mean(), **options}
    with Pipeline({0: module}, **options) as pipe:
        pipe.forward_backward(x, x)
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return gradients


def assert_same_gradients(module: nn.Module, **options: Any) -> None:
    """Split backward, with these options, gives what full backward gives."""
    expected = gradients_of(module, schedule="1f1b")
    torch.testing.assert_close(gradients_of(module, **options), expected, rtol=1e-12, atol=1e-12)


def test_recompute_lost_the_weight_gradients_of_split_backward() -> None:
    """A checkpoint gives back copies of what was saved, parameters too; the gradients went to the copies."""
    assert_same_gradients(nn.Linear(6, 6).double(), recompute="full")


def test_weight_gradients_had_a_graph() -> None:
    """They were made from an activation that still knew where it came from, so every microbatch stayed alive."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    assert not any(gradient.requires_grad for gradient in gradients_of(module) if gradient is not None)


class Slope(nn.Module):
    """Adds the derivative of its linear map, taken inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(point).tanh().sum(), point, create_graph=True)
        y: Tensor = self.linear(x) + slope
        return y


def test_a_gradient_inside_a_recomputed_forward_took_the_weight_for_its_transpose() -> None:
    """torch hands ``autograd.grad`` to a function mode whole, which is off meanwhile; what was computed again in it
    saved other tensors than the first time, among them the transposed weight in the place of the weight."""
    assert_same_gradients(Slope(), recompute="full")


class Inverting(torch.autograd.Function):
    """Computes its input's linear map again in its backward, and asks for the gradient of the weight by name."""

    @staticmethod
    def forward(ctx: Any, linear: nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = linear(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        with torch.enable_grad():
            y = ctx.linear(*ctx.saved_tensors)
        return None, None, torch.autograd.grad(y, ctx.linear.weight, dy)[0]


class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Inverting.apply(self.linear, x, self.linear.weight)
        return y


def test_a_gradient_that_user_code_asked_for_in_its_backward_was_put_off() -> None:
    """It was taken for the stage's own, so the user's code was told that the weight had not been used."""
    assert_same_gradients(Inverted())


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.func.vmap(self.linear)(x)
        return y


def test_vmap_inside_a_stage_was_an_error_under_split_backward() -> None:
    """Transforms differentiate by themselves, and know nothing of operations that put their gradient off."""
    assert_same_gradients(Mapped())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.to(torch.complex128))
        return y.real + y.imag


def test_complex_weights_got_the_conjugate_of_their_gradient_under_split_backward() -> None:
    assert_same_gradients(nn.Sequential(Complex(), Complex()))


class Lowered(nn.Module):
    """A float64 linear inside an autocast region, which leaves float64 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.linear(x)
        return y


def test_float64_inside_an_autocast_region_was_an_error_under_split_backward() -> None:
    """The input was kept in the autocast type even where the operation does not compute in it."""
    assert_same_gradients(Lowered())


class ReluFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.relu_())
        return y


def test_the_first_stage_could_not_overwrite_its_input() -> None:
    """Microbatches are views of one batch and shared its version counter, so overwriting the second one spoiled what
    autograd had saved of the first."""
    assert all(gradient is not None for gradient in gradients_of(ReluFirst(), schedule="gpipe"))


def test_a_step_inside_no_grad_trained_nothing_without_a_word() -> None:
    module = nn.Linear(6, 6).double()
    with torch.no_grad():
        assert all(gradient is not None for gradient in gradients_of(module, schedule="1f1b"))


def test_outputs_of_several_structures_were_joined_up_to_the_shortest() -> None:
    with pytest.raises(ValueError, match="must be of one structure"):
        join([torch.ones(1), (torch.ones(1), torch.ones(1))])


def test_tensors_inside_tuples_among_the_keywords_were_not_cut() -> None:
    """Every microbatch got all rows of them."""
    parts = split_keywords({"pair": (torch.arange(4), "word")}, 2, {})
    assert [part["pair"][0].tolist() for part in parts] == [[0, 1], [2, 3]]


def alone(module: nn.Module, **options: Any) -> Pipeline:
    """A pipeline of one rank."""
    options = {"schedule": "gpipe", "loss_fn": nn.functional.mse_loss, "num_microbatches": 2, **options}
    return Pipeline({0: module}, **options)


def test_masters_that_a_trainer_had_stepped_never_reached_the_stage() -> None:
    """They were rounded to what computes after train_step only."""
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    with alone(module, master_weights=True) as pipe:
        optimizer = torch.optim.SGD(pipe.named_parameters(), lr=1.0)
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        before = pipe.predict(x)
        pipe.forward_backward(x, x)
        optimizer.step()
        assert not torch.equal(pipe.predict(x), before)


def test_masters_were_not_saved() -> None:
    """What was loaded went on from the rounded weights."""
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    options = {"master_weights": True, "optimizer": lambda named: torch.optim.SGD(named, lr=1e-4)}
    with alone(nn.Linear(2, 2, dtype=torch.bfloat16), **options) as pipe:
        pipe.train_step(x, x)
        masters = [weight.detach().clone() for _, weight in pipe.named_parameters()]
        state = pipe.state_dict()
    with alone(nn.Linear(2, 2, dtype=torch.bfloat16), **options) as pipe:
        pipe.load_state_dict(state)
        assert all(torch.equal(weight, master) for (_, weight), master in zip(pipe.named_parameters(), masters))


class FailsAtTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 2).any():
            raise RuntimeError("two")
        y: Tensor = self.linear(x)
        return y


def test_a_batch_that_failed_took_accumulated_gradients_along() -> None:
    module = FailsAtTwo()
    with alone(module) as pipe:
        pipe.forward_backward(torch.ones(2, 2), torch.zeros(2, 2))
        with pytest.raises(RuntimeError, match="two"):
            pipe.forward_backward(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.zeros(2, 2))
        assert module.linear.weight.grad is not None


def test_an_overflow_while_accumulating_left_infinite_gradients_and_the_same_scale() -> None:
    """Only train_step looked at what the ranks had agreed on."""
    module = nn.Linear(2, 2)
    with alone(module, loss_scale="dynamic") as pipe:
        pipe.forward_backward(torch.full((2, 2), 1e30), torch.zeros(2, 2))
        assert pipe.overflowed
        assert pipe.loss_scale == 32768
        assert module.weight.grad is None


def test_a_scale_that_the_loss_could_not_hold_was_an_error() -> None:
    """65536 is more than the largest float16, so the very first step of a loss in float16 raised."""
    options = {"loss_scale": "dynamic", "num_microbatches": 1, "loss_fn": lambda output, target: output.half().mean()}
    with alone(nn.Linear(2, 2), **options) as pipe:
        pipe.forward_backward(torch.ones(2, 2), torch.zeros(2, 2))
        assert pipe.overflowed


def test_weights_that_were_tied_within_one_stage_were_not() -> None:
    """A group that lay on one stage was taken for one parameter."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with alone(module, tied=[["0.weight", "1.weight"]]):
        assert module[0].weight is module[1].weight


def test_a_number_as_a_metric_was_rounded_to_float32() -> None:
    with alone(nn.Linear(2, 2), loss_fn=lambda output, target: (output.mean(), {"third": 1 / 3})) as pipe:
        pipe.eval_step(torch.ones(2, 2), torch.zeros(2, 2))
        assert pipe.metrics["third"].item() == 1 / 3


def test_recompute_showed_a_batch_norm_everything_twice() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with alone(module, recompute="full") as pipe:
        pipe.forward_backward(torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2))
        assert module[1].num_batches_tracked == 2


def test_train_step_without_an_optimizer_trained_nothing_without_a_word() -> None:
    with alone(nn.Linear(2, 2)) as pipe, pytest.raises(ValueError, match="train_step makes an update"):
        pipe.train_step(torch.ones(2, 2), torch.zeros(2, 2))


def test_a_pipeline_that_takes_several_windows_to_fill_was_taken_for_full() -> None:
    """From the fourth window on all were like the fourth; under pipedream with M < P-1 that one has no backward yet."""
    schedule = create("pipedream", num_ranks=6, num_microbatches=1)
    assert isinstance(schedule, AsynchronousSchedule)
    verify(Windows(schedule).program((9,)))


def test_a_gradient_was_divided_by_another_scale_than_its_loss_was_multiplied_by() -> None:
    """Under 2bw an overflow halves the scale while the next batch, multiplied by the old one, is still in flight."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    options: dict[str, Any] = {
        "schedule": "2bw",
        "loss_scale": "dynamic",
        "loss_fn": lambda output, target: output.mean(),
    }
    with alone(module, optimizer=lambda named: torch.optim.SGD(named, lr=0.25), **options) as pipe:
        for x in (1.0, float("inf"), 1.0):
            pipe.train_step(torch.full((2, 1), x), torch.zeros(2, 1))
        pipe.flush()
        assert module.weight.item() == 0.5


def test_a_layout_that_only_the_sender_knew_was_not_sent() -> None:
    """With one microbatch a batch, the second one's receive is posted before the first one has been taken: its sender
    had seen the layout by then, its receiver had not, and waited for it for ever."""
    hub = Hub(2)
    here, there = (DeviceTransport(ThreadTransport(hub, rank), lambda line: Memory(), CPU) for rank in range(2))
    channel = Channel(0, 1, "activation", depth=2)
    for transport in (here, there):
        transport.open([channel])
        transport.begin(Session(fixed_shapes=True, num_microbatches=1))
    for microbatch in range(2):
        here.send(channel, pack(torch.ones(3), "stage 0"), 1, microbatch)
        there.post(channel, 1, microbatch)
    assert hub.num_waiting == 2


class Memory:
    """A communicator to nowhere."""

    def send(self, data: Tensor) -> "Memory":
        return self

    def receive(self, data: Tensor) -> "Memory":
        return self

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


def test_a_checkpoint_of_2bw_lacked_the_version_that_the_next_batch_reads() -> None:
    """So that one ran on newer weights than it should: 1, .75, then .75 - .25 * 1, and not .75 - .25 * .75."""
    weights = []
    state: dict[str, Any] = {}
    for _ in range(2):
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        options: dict[str, Any] = {"schedule": "2bw", "loss_fn": lambda output, target: (output**2).mean() / 2}
        with alone(module, optimizer=lambda named: torch.optim.SGD(named, lr=0.25), **options) as pipe:
            if state:
                pipe.load_state_dict(state)
            pipe.train_step(torch.ones(2, 1), torch.zeros(2, 1))
            state = deepcopy(pipe.state_dict())
            weights.append(module.weight.item())
    assert weights == [0.75, 0.5]


def test_a_learning_rate_in_a_tensor_was_that_of_the_next_batch() -> None:
    """What was noted for the update was the tensor, and a scheduler changes that in place."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=torch.tensor(0.5))
    plans = Plans(optimizer)
    plans.note([1])
    optimizer.param_groups[0]["lr"].fill_(0.25)
    with plans.of(1):
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_receive_that_a_failing_rank_let_go_held_up_its_last_words() -> None:
    """Gloo cannot skip a message whose receive was released: nothing of that connection was read any more, not even
    that the other side was ready to hear of the failure, and a thread of gloo's turned round on it for ever."""
    assert launch_local(fail_with_receives_posted, 2)[1] == "rank 0 failed"


def test_a_metric_named_loss_was_added_to_the_loss() -> None:
    """Both were kept under that name."""
    x, y = torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    with alone(nn.Identity(), loss_fn=lambda output, target: (squared(output, target), {"loss": 5.0})) as pipe:
        assert pipe.eval_step(x, y) == squared(x, y)
        assert pipe.metrics == {"loss": 5.0}


def test_a_metric_that_some_microbatches_lack_counted_0_there() -> None:
    """It is a mean over those that give it."""
    rows = torch.arange(4.0)[:, None]
    for count in (None, 2):
        with alone(nn.Identity(), loss_fn=partial(sometimes_measured, count)) as pipe:
            pipe.eval_step(rows, rows, num_microbatches=4)
            assert pipe.metrics == {"hard": 2.0}


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sometimes_measured(count: int | None, output: Tensor, target: Tensor) -> Any:
    """Measures the rows 1 and 3."""
    metrics = {"hard": output.item()} if output.item() % 2 else {}
    loss = squared(output, target)
    return (loss, metrics) if count is None else (loss * count, count, metrics)


def test_what_was_unfrozen_later_was_neither_divided_nor_counted() -> None:
    """A pipeline notes what it trains when it is built; what came later kept the gradient of the sum of a loss that
    comes as (sum, count), was not added up over copies, and missing in the norm."""
    module = nn.Linear(2, 2).requires_grad_(False)
    with alone(nn.Sequential(module, nn.Linear(2, 2))) as pipe:
        pipe.forward_backward(torch.ones(4, 2), torch.ones(4, 2))
        module.requires_grad_(True)
        with pytest.raises(ValueError, match=r"0.weight of stage 0 was frozen when the Pipeline was built"):
            pipe.forward_backward(torch.ones(4, 2), torch.ones(4, 2))


class Twin(nn.Module):
    """Gives the same tensor twice; whoever changes one of them in place changes both."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(2, 2, dtype=torch.float64)
        self.stage = stage

    def forward(self, x: Any) -> Any:
        if self.stage:
            x = x["one"][0].mul_(2) + x["other"]
        y = self.linear(x) * 1
        return y if self.stage == 3 else {"one": [y], "other": y}


def train_twins(context: RankContext, schedule: str) -> Tensor | None:
    with Pipeline(
        Twin, schedule=schedule, num_microbatches=4, loss_fn=squared, transport=context.transport, share_loss=True
    ) as pipe:
        return pipe.forward_backward(torch.ones(4, 2).double(), torch.zeros(4, 2).double())


@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 4), ("zbv", 2)])
def test_a_tensor_that_crossed_twice_became_two(schedule: str, num_ranks: int) -> None:
    """So a change in place reached one of them; on the same rank, another result again."""
    x: Any = torch.ones(4, 2).double()
    for stage in range(4):
        x = Twin(stage)(x)
    for loss in launch_local(train_twins, num_ranks, backend="threads", args=(schedule,)):
        torch.testing.assert_close(loss, squared(x, torch.zeros(4, 2).double()).detach(), rtol=1e-12, atol=1e-12)


class ForwardMode(nn.Module):
    """Adds its own directional derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            y, slope = forward_ad.unpack_dual(self.linear(forward_ad.make_dual(x, torch.ones_like(x))))
        return y + slope


def test_forward_mode_inside_a_stage_was_an_error_under_split_backward() -> None:
    assert_same_gradients(ForwardMode())


class Broken(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * float("nan")


class BreaksBelow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        below: Tensor = Broken.apply(self.below(x))
        above: Tensor = self.above(below)
        return above


def test_a_norm_that_is_no_number_clipped_nothing() -> None:
    """min(1, NaN) is 1 in Python; torch's own clipping makes all gradients NaN then, so that nobody trains on."""
    module = BreaksBelow()
    with alone(module, max_norm=1.0, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)) as pipe:
        pipe.train_step(torch.ones(4, 2), torch.ones(4, 2))
        assert all(parameter.isnan().all() for parameter in module.parameters())


def test_a_spec_of_more_keywords_than_a_step_has_was_refused() -> None:
    """Optional ones could not be left out."""
    parts = split_keywords({"mask": torch.ones(2, 2)}, 2, {"mask": 1, "positions": None})
    assert [part["mask"].shape for part in parts] == [(2, 1), (2, 1)]
    with pytest.raises(ValueError, match=r"split_spec names \['maks'\], but the arguments are \['mask'\]"):
        split_keywords({"mask": torch.ones(2, 2)}, 2, {"maks": 1})


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        (torch.empty(3, device="meta"), "tensor of torch.strided, torch.float32, without data"),
        (None, "nested tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_tensor_without_numbers_or_shape_was_an_error_from_within_torch(member: Tensor | None, kind: str) -> None:
    member = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) if member is None else member
    with pytest.raises(TypeError, match=rf"output\[1\] of stage 3 is a {kind}: what crosses to another stage is"):
        check_crossing(pack((torch.ones(2), member), "stage 3"), "stage 3")


def test_a_loss_without_a_graph_trained_nothing_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """It is no error, since a microbatch may have nothing to learn from, but hardly a whole batch."""
    with alone(nn.Linear(2, 2), loss_fn=lambda output, target: squared(output.detach(), target)) as pipe:
        pipe.forward_backward(torch.ones(4, 2), torch.ones(4, 2))
    assert [record.message for record in caplog.records] == [
        "step 0 trains nothing: no loss depends on the output of the model; does loss_fn detach it?"
    ]


class Random(nn.Linear):
    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        super().__init__(2, 2)


def random_copies(context: RankContext) -> dict[int, Tensor]:
    with Pipeline(
        lambda stage: Random(context.rank), schedule="dualpipe", num_microbatches=4, transport=context.transport
    ) as pipe:
        return {stage: module.weight.detach().clone() for stage, module in pipe.modules.items()}


def test_copies_of_a_stage_started_from_different_weights() -> None:
    """Under dualpipe and chimera, with modules that were not seeded: two models under one name."""
    one, other = launch_local(random_copies, 2, backend="threads")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[stage], other[stage]) for stage in one)


def test_the_number_of_microbatches_could_be_set_and_cut_the_batch_short() -> None:
    """The program went on with as many as it was made for, of parts that were cut for another number."""
    with alone(nn.Linear(2, 2)) as pipe, pytest.raises(AttributeError):
        pipe.num_microbatches = 8  # type: ignore[misc]


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_what_was_frozen_between_batches_of_2bw_changed_every_other_time(num_batches: int) -> None:
    """Only the version that stood in the module's slots was frozen."""
    module = nn.Linear(2, 2)
    batch = torch.ones(4, 2), torch.ones(4, 2)
    pipe = alone(module, schedule="2bw", optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    for _ in range(num_batches):
        pipe.train_step(*batch)
    module.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="weight of stage 0 is frozen now, .* before the Pipeline is built"):
        pipe.train_step(*batch)


MASKS = """
import signal
from multiprocessing import util

from stagewright.engine import launch_local

spawn = util.spawnv_passfds


def noting(path, args, passfds):
    kind = "rank" if "--multiprocessing-fork" in args else "tracker"
    print(kind, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
    return spawn(path, args, passfds)


def nothing(context):
    pass


if __name__ == "__main__":
    util.spawnv_passfds = noting
    launch_local(nothing, 2)
"""


def test_ranks_were_born_with_an_ear_for_ctrl_c(tmp_path: Path) -> None:
    """Multiprocessing starts a helper before the first rank, and lets SIGINT in afterwards: a Ctrl-C that met a rank
    while its Python was starting ended in "Fatal Python error: interrupted" instead of one line."""
    script = tmp_path / "masks.py"
    script.write_text(MASKS, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100)
    assert [line for line in done.stdout.splitlines() if line.startswith("rank")] == ["rank True"] * 2


def statistics_of_normed(context: RankContext, schedule: str, recompute: str) -> list[Tensor]:
    with Pipeline(
        lambda stage: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) if stage == 0 else nn.Linear(2, 2),
        schedule=schedule,
        replicas=(2, 1),
        num_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        transport=context.transport,
        deferred_batch_norm=True,
        recompute=recompute,
    ) as pipe:
        x = torch.arange(32.0).reshape(16, 2)
        pipe.train_step(x, x)
        pipe.flush()
        return [buffer for module in pipe.modules.values() for name, buffer in module.named_buffers() if "mean" in name]


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_batch_norms_told_each_other_of_a_batch_with_gradients_that_came_later(schedule: str, recompute: str) -> None:
    """Copies of a stage exchanged what they had seen with the sums of gradients, which without a flush lie in the next
    batch, so that each copy remembered something else. And what was computed again in the drain was an error."""
    one, other, nothing = launch_local(statistics_of_normed, 3, backend="threads", args=(schedule, recompute))
    assert nothing == []
    for (mean,) in (one, other):
        torch.testing.assert_close(mean, 0.1 * torch.tensor([15.0, 16.0]))


def test_a_mesh_in_another_order_than_torchs_groups_hung() -> None:
    """torch sorts the ranks of each group, so rank 3, the mesh's first of a pipeline, was the last of its group."""
    (said,) = {*map(tuple, launch_on("gloo", use_mesh_of, 4, ([[[3, 0], [1, 2]]], ("pp", "dp"))))}
    assert said[0].startswith("ranks ascend along the dimension 'pp' of a mesh")


def test_replicas_with_a_parameter_frozen_on_one_aborted_the_process() -> None:
    """gloo was given 88 bytes to add to 80."""
    (said,) = set(launch_on("gloo", try_to_train, 4, ({3: "frozen"}, "1f1b", 2, {})))
    assert "1.bias of stage 1 is trained float64[6] on rank 1 of replica 0, frozen float64[6] on rank 1 of" in said


def test_ranks_left_in_the_environment_made_a_training_of_each_process() -> None:
    """RANK and WORLD_SIZE of another launch came before what mpirun said."""
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(
        ValueError, match="WORLD_SIZE=1 contradicts OMPI_COMM_WORLD_SIZE=2, .* unset RANK and WORLD_SIZE"
    ):
        started_rank(variables)


def test_a_list_of_very_many_machines_filled_the_memory() -> None:
    """All were written out, for the sake of the first one."""
    assert first_node("n[1-99999999999]") == ("n1", False)


def test_a_cut_of_floats_could_be_made_and_not_built() -> None:
    parts = parts_of_transformer(6)
    for counts in ((2.0, 4), (True, 5)):
        with pytest.raises(TypeError, match="the layers of stage 0 must be a whole number: got"):
            cut_by_counts(parts, counts)


def test_fewer_layers_than_stages_were_a_cut_if_counted_by_hand() -> None:
    """An embedding alone made the first stage, a head alone the last one, and there was one layer between them."""
    parts = parts_of_transformer(1)
    for cut in (partial(cut_by_counts, parts, (0, 1, 0)), partial(cut_by_layout, parts, "E|t|L")):
        with pytest.raises(ValueError, match="every stage needs at least 1 layer: got 1 layers for 3 stages"):
            cut()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_tensor_that_is_no_buffer_stayed_on_the_meta_device() -> None:
    """So did the weights in the list that an LSTM keeps of them."""
    with pytest.raises(ValueError, match="0, a Plain, has in scale what is neither parameter nor buffer"):
        cut_sequential(lambda: nn.Sequential(Plain())).build(range(1))
    output, _ = cut_sequential(lambda: nn.Sequential(nn.LSTM(2, 3))).build(range(1))(torch.ones(4, 1, 2))
    assert not output.is_meta


def test_nobody_said_what_proves_a_program_with_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --gradient-buffers and --update-every it was refused, and neither hint nor help spoke of them."""
    file = str(tmp_path / "pipedream.csv")
    flags = ["--ranks", "3", "--microbatches", "4", "--schedule-option", "replicas=2,1", "-o", file]
    assert main(["show", "pipedream", *flags]) == 0
    command = capsys.readouterr().err.removeprefix("to prove it: stagewright ")
    assert "--update-every 2" in command
    assert "--gradient-buffers 2" in command
    assert main(command.split()) == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_json_of_others_was_read_in_whatever_encoding_it_seemed_to_be(encoding: str, tmp_path: Path) -> None:
    """The json module guesses the encoding of bytes, lets half characters pass, and imports code for the purpose."""
    with pytest.raises(ValueError, match="describes itself in a way that cannot be read"):
        read_layout('["n",[],[],[]]'.encode(encoding))
    (tmp_path / "index.json").write_bytes('{"sha256": "", "content": {}}'.encode(encoding))
    with pytest.raises(ValueError, match=r"index.json cannot be read: (.*codec can't decode|Unexpected UTF-8 BOM|Exp)"):
        read_index(tmp_path)
    text = "{}".encode(encoding)
    (tmp_path / "weights").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="weights cannot be read: "):
        read_state_dict(tmp_path / "weights")


def test_a_checkpoint_whose_further_names_were_none_was_a_type_error(tmp_path: Path) -> None:
    """A list in the place of a name cannot be looked up."""
    rank = {"tensors": [], "aliases": {"head.weight": ["embedding.weight"]}, "shape": [1, 1]}
    index = Index(1, [Written(0, "")], [rank])
    (tmp_path / "index.json").write_bytes(index.to_json())
    with pytest.raises(ValueError, match=r"index.json cannot be read: head.weight should be another name"):
        Source(tmp_path)


def test_a_profile_was_read_whole_before_anybody_saw_how_long_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(ValueError, match="at most 16000000 characters"):
        read_profile(path)


def test_a_rank_that_does_nothing_was_lost_on_its_way_through_a_file() -> None:
    """It was written as an empty line, which is no rank's, and all ranks after it moved up by one."""
    program = Program.from_csv(",\n0F0,0B0,0STEP@1")
    assert program.to_csv() == ",\n0F0,0B0,0STEP@1\n"
    assert Program.from_csv(program.to_csv()).streams == program.streams == ((), program.streams[1])


@pytest.mark.parametrize("mark", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r"])
def test_more_than_the_end_of_a_line_ended_a_rank(mark: str) -> None:
    """Python sees lines where editors and csv readers see none: what followed a form feed was another rank's."""
    (stream,) = Program.from_csv(f"0F0,{mark}0B0,0STEP@1\r\n").streams
    assert list(map(str, stream)) == ["0F0", "0B0", "0STEP@1"]


def test_ranks_that_torchrun_started_again_read_what_those_before_them_had_left() -> None:
    """torchrun keeps one store for all restarts: ranks called addresses at which nobody listened any more, and used up
    restarts in vain; on several machines, which count restarts each for itself, all of them."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        for attempt in range(3):
            rounds = list(pool.map(enter_round, [store] * 2, range(2), [2] * 2))
            assert not any(own.check(["address of rank 0"]) for own in rounds)
            rounds[0].set("address of rank 0", str(attempt))
            assert rounds[1].get("address of rank 0") == str(attempt).encode()


def test_a_pipeline_without_a_flush_hung_where_the_first_rank_had_one_batch_less() -> None:
    """It drained, and waited for gradients; the others had begun a batch whose activations it never sent."""
    said = launch_local(train_to_the_end_of_the_data, 3, backend="threads", args=("2bw", 0))
    assert all(text.startswith("data ended on rank 0 after batch 2") for text in said)


def test_a_device_waited_for_ever_for_a_rank_whose_data_had_ended() -> None:
    """On NCCL a receive that nobody sends to keeps the device, and then the host, busy until the watchdog kills the
    process; layouts travel in the first step only, so that the hosts had nothing to hear of it by."""
    said = launch_on("double", train_to_the_end_of_the_data, 3, ("1f1b", 1))
    assert said[1] == "2 steps"
    assert all("rank 1 has returned while another rank still waits" in text for text in (said[0], said[2]))


def test_measuring_spoiled_what_it_measured_or_could_not_begin() -> None:
    """Parts got leaves, in which nothing works in place, or the caller's own batch; running statistics went on."""
    norm = nn.BatchNorm1d(2)
    model = cut_sequential(lambda: nn.Sequential(nn.ReLU(inplace=True), norm, nn.ReLU(inplace=True)))
    inputs = -torch.ones(3, 2)
    profile = measure_profile(model, inputs, torch.zeros(3, 2), nn.functional.mse_loss, num_rounds=1)
    assert profile.parts[2].backward > 0
    assert torch.equal(inputs, -torch.ones(3, 2))
    assert torch.equal(norm.running_var, torch.ones(2))
    assert norm.num_batches_tracked == 0


def test_a_profile_cut_any_model_with_as_many_layers() -> None:
    """Names were compared, sizes were not, and all decoders have the same names."""
    small, large = (GPT(GPTConfig(num_layers=2, hidden_size=size, num_heads=1, sequence_length=2)) for size in (2, 4))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    profile = measure_profile(small, tokens, tokens, lambda output, _: output.sum(), num_rounds=1)
    cut_by_profile(small.parts, profile, 2, num_parameters=small.num_parameters())
    with pytest.raises(ValueError, match="whose part 0, embedding, has 516 parameters, for a model where it has 1032"):
        cut_by_profile(large.parts, profile, 2, num_parameters=large.num_parameters())


FAILING = """
from failing import fail_in_step
from stagewright.engine import from_environment

with from_environment() as context:
    fail_in_step(context, "forward")
"""


def test_torchrun_ended_a_rank_before_it_had_printed_its_traceback(tmp_path: Path) -> None:
    """It stayed for a second so that all could hear of its error; they went at once, and torchrun ends all ranks as
    soon as one has ended. Where in the stage the error was raised was lost."""
    script = tmp_path / "failing_script.py"
    script.write_text(FAILING, encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), str(script)]
    helpers = os.pathsep.join([str(Path(__file__).parent / "engine"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": helpers}
    run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    said = run.stderr.replace("[rank1]: ", "")
    assert "ValueError: boom in forward\nrank 1 failed at 1F2 (step 1)\n" in said


def test_a_stage_whose_backward_ran_beside_a_forward_only_got_the_costs_of_another() -> None:
    """Under dualpipe: the program itself was predicted well, any other that was planned with these costs was not."""
    costs = Costs(
        forward=(10, 20), backward=(20, 40), input_gradient=(10, 20), weight_gradient=(10, 20), overlapped=(30, 60)
    )
    program = create("dualpipe", num_ranks=2, num_microbatches=8).program()
    simulated = simulate(program, costs)
    table = program.table
    alone = {
        (table.operation[row], table.stage[row]) for row in range(len(table)) if not {row, row - 1} & set(table.fused)
    }
    assert any((BACKWARD, stage) not in alone for stage in (0, 1)), "or there is nothing to conclude"
    fitted = mean_costs([Timeline(program, Costs(), simulated.starts, simulated.ends)])
    assert fitted.backward == pytest.approx((20, 40))
    assert fitted.input_gradient == pytest.approx((10, 20))
    assert fitted.weight_gradient == pytest.approx((10, 20))


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_without_a_text(context: RankContext) -> str:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise UnspeakableError

    try:
        with Pipeline(
            lambda stage: nn.Linear(2, 2),
            schedule="gpipe",
            num_microbatches=2,
            loss_fn=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            transport=context.transport,
        ) as pipe:
            pipe.train_step(torch.ones(2, 2), torch.ones(2, 2))
    except Exception as error:
        return described(error)
    return "nothing"


def test_an_error_whose_text_fails_hid_behind_that_failure() -> None:
    """Whoever told the other ranks of it asked for its text."""
    said = launch_local(fail_without_a_text, 2, backend="threads")
    own = "UnspeakableError: <its message cannot be made: RuntimeError>"
    assert said == [f"PeerError: rank 1 failed at 1F0 (step 0): {own}", own]


class FullDisk(Files):
    def append(self, file: IO[bytes], part: Part) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_did_not_say_which_file_it_was_too_full_for(tmp_path: Path) -> None:
    """An OSError names a file that cannot be opened, and none that cannot be written."""
    with pytest.raises(OSError, match=r"No space left on device.*rank-0\.safetensors") as caught:
        FullDisk().write(tmp_path / "rank-0.safetensors", [b"weights"])
    assert pickle.loads(pickle.dumps(caught.value)).filename == str(tmp_path / "rank-0.safetensors")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only some systems have such a device")
def test_metrics_on_a_full_disk_ended_in_a_traceback_and_not_in_a_line() -> None:
    """That they could be opened was all that was asked."""
    metrics = StepMetrics(step=1, loss=1.0, tokens_per_second=1.0, step_seconds=1.0)
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        with pytest.raises(MetricsError, match="cannot write the metrics to /dev/full: No space left on device"):
            JsonLines(file).step_done(metrics)
        assert file.closed, "or closing it would raise once more"
