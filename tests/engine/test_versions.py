"""Weights in several versions: switched without a copy, guarded by autograd, all under the names of one module."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import make_stage
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from stagewright.engine.stages.randomness import Seeds
from stagewright.engine.stages.stage import Stage
from stagewright.engine.updates.versions import VersionedWeights
from stagewright.engine.updates.weights import SingleWeights
from stagewright.engine.value import pack

CPU = torch.device("cpu")


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in module.named_parameters()}


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def update(weights: VersionedWeights, version: int, change: float = 1.0) -> None:
    """As an optimizer that adds a number to every weight."""
    weights.begin_update(version)
    for parameter in weights.trained.values():
        parameter += change
    weights.publish()


def test_switching_copies_nothing() -> None:
    """Every version keeps its memory, and the module shows it under its old names."""
    module = make_stage(0)
    weights = VersionedWeights(module, 3)
    update(weights, 1)
    update(weights, 2)
    seen = []
    for version in (0, 1, 2, 1, 0, None):
        weights.use(version)
        seen.append(addresses(module))
    zero, one, two, one_again, zero_again, newest = seen
    assert (zero, one, two) == (zero_again, one_again, newest)
    for name in zero:
        assert len({zero[name], one[name], two[name]}) == 3


def test_each_version_has_its_own_values() -> None:
    module = make_stage(0)
    before = values(module)
    weights = VersionedWeights(module, 2)
    update(weights, 1)
    update(weights, 2)  # in the place of version 0
    for version, change in ((1, 1), (2, 2), (None, 2)):
        weights.use(version)
        for name, value in values(module).items():
            torch.testing.assert_close(value, before[name] + change, rtol=0, atol=1e-12)


def test_the_optimizer_trains_the_newest_version() -> None:
    """One and the same parameter for all its life, over the memory of whatever version is the newest."""
    module = make_stage(0)
    weights = VersionedWeights(module, 2)
    trained = dict(weights.trained)
    for version in range(1, 5):
        update(weights, version)
        weights.use(version)
        assert addresses(module) == {name: parameter.data_ptr() for name, parameter in trained.items()}
        assert all(weights.trained[name] is parameter for name, parameter in trained.items())


class Mixed(nn.Module):
    """Types and shapes of all kinds, a frozen weight, a buffer, a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3).to(torch.bfloat16)
        self.other = nn.Linear(3, 3).to(torch.bfloat16)
        self.other.weight = self.linear.weight
        self.cube = nn.Parameter(torch.zeros(2, 3, 5, dtype=torch.float64).transpose(0, 2))
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("steps", torch.zeros(4))


def test_types_shapes_and_names_stay() -> None:
    module = Mixed()
    before = {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
    old = values(module)
    weights = VersionedWeights(module, 2)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()} == before
    assert all(torch.equal(value, old[name]) for name, value in values(module).items())
    update(weights, 1)
    weights.use(None)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()} == before
    assert all(torch.equal(value, old[name] + (name != "frozen")) for name, value in values(module).items())


def test_a_weight_in_two_places_is_one_weight_in_every_version() -> None:
    module = Mixed()
    weights = VersionedWeights(module, 2)
    for version in (1, 2, 3):
        update(weights, version)
        weights.use(version)
        assert module.linear.weight is module.other.weight
    assert [name for name in weights.trained if name.startswith("other")] == ["other.bias"]


def test_what_is_not_trained_has_one_version() -> None:
    module = Mixed()
    frozen, steps = module.frozen, module.steps
    weights = VersionedWeights(module, 2)
    update(weights, 1)
    for version in (0, 1):
        weights.use(version)
        assert module.frozen is frozen
        assert module.steps is steps
    assert "frozen" not in weights.trained


def test_every_weight_starts_where_kernels_like_it() -> None:
    """As if it had memory of its own: at a multiple of 64 bytes."""
    module = Mixed()
    weights = VersionedWeights(module, 2)
    for version in (0, 1):
        weights.use(version)
        assert all(
            parameter.data_ptr() % 64 == 0
            for name, parameter in module.named_parameters()
            if parameter.numel() and name != "frozen"
        )


def test_hooks_and_marks_of_a_parameter_go_along() -> None:
    """Hooks see the gradients of every version; what else its owner wrote on it the optimizer's maker can read."""
    module = nn.Linear(3, 3)
    seen: list[str] = []
    module.weight.register_hook(lambda gradient: seen.append("before"))
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    module.weight.no_decay = True
    weights = VersionedWeights(module, 2)
    assert weights.trained["weight"].no_decay
    update(weights, 1)
    for version in (0, 1):
        weights.begin_backward(version, 1)
        module(torch.ones(2, 3)).sum().backward()
        weights.end_backward(version, 1)
    assert seen == ["before", "after"] * 2


# Guarded


def stage_of(module: nn.Module, num_versions: int, **options: Any) -> Stage:
    return Stage(1, module, Seeds(0, CPU), weights=VersionedWeights(module, num_versions), **options)


def forward(stage: Stage, microbatch: int, version: int, x: Tensor) -> Tensor:
    stage.weights.use(version)
    packed = pack(x.detach().requires_grad_(), "the test")
    return stage.hand_on(microbatch, stage.forward(microbatch, (0, microbatch), packed, {}, 0)).tensors[0]


@pytest.mark.parametrize("num_versions", [2, 3])
def test_a_version_that_is_overwritten_in_flight_is_an_error(num_versions: int) -> None:
    """Autograd counts what happens to each buffer: a backward that would find other weights than its forward raises."""
    stage = stage_of(make_stage(1), num_versions)
    x = torch.randn(4, 6, dtype=torch.float64)
    y = forward(stage, 0, 0, x)
    assert isinstance(stage.weights, VersionedWeights)
    for version in range(1, num_versions + 1):
        update(stage.weights, version)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.backward(0, [torch.ones_like(y)], version=0, update=1)


def test_versions_beside_the_one_in_flight_may_change() -> None:
    stage = stage_of(make_stage(1), 2)
    x = torch.randn(4, 6, dtype=torch.float64)
    y = forward(stage, 0, 0, x)
    assert isinstance(stage.weights, VersionedWeights)
    update(stage.weights, 1)
    stage.backward(0, [torch.ones_like(y)], version=0, update=1)
    assert stage.weights._gradients[1].keys() == stage.weights.trained.keys()


class Checkpointed(nn.Module):
    """A user's own checkpoint inside a stage: its part runs again in the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = make_stage(5)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x + y


@pytest.mark.parametrize("options", [{}, {"num_kept": 0}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_whatever_runs_again_reads_the_version_of_its_forward(use_reentrant: bool, options: dict[str, Any]) -> None:
    """Although a newer one is there by then, and is what the module used last."""
    x, dy = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    plain = Checkpointed(use_reentrant=use_reentrant)
    plain(x.requires_grad_()).backward(dy)
    stage = stage_of(Checkpointed(use_reentrant=use_reentrant), 2, **options)
    assert isinstance(stage.weights, VersionedWeights)
    forward(stage, 0, 0, x)
    update(stage.weights, 1)
    forward(stage, 1, 1, x)
    (dx,) = stage.backward(0, [dy], version=0, update=1)
    torch.testing.assert_close(dx, x.grad, rtol=1e-13, atol=1e-13)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(stage.weights._gradients[1][name], parameter.grad, rtol=1e-13, atol=1e-13)


# Modules of many kinds


class Recurrent(nn.Module):
    """Looks its weights up once, when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return y


def test_a_recurrent_module_need_not_gather_its_weights_anew() -> None:
    """On a GPU it would move them to other memory, away from that of their version."""
    module = nn.LSTM(3, 3, proj_size=2)
    weights = VersionedWeights(module, 2)
    update(weights, 1)
    for version in (0, 1):
        weights.use(version)
        assert not module._weights_have_changed()
        assert all(one is other for one, other in zip(module._flat_weights, module.all_weights[0]))


def spectral() -> nn.Module:
    return spectral_norm(nn.Linear(3, 3)).eval()


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 4, dropout=0, batch_first=True)


KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "spectral norm": spectral,
    "attention": attention,
    "bilinear list": lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.PReLU(), nn.BatchNorm1d(4, affine=True).eval()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_compute_with_the_version_that_is_in_use(kind: str) -> None:
    torch.manual_seed(0)
    module = KINDS[kind]()
    torch.manual_seed(0)
    plain = KINDS[kind]()
    weights = VersionedWeights(module, 2)
    x = torch.randn(2, 4, 3)
    update(weights, 1, 0.1)
    for version in (0, 1, 0):
        with torch.no_grad():
            for name, parameter in weights._of(version).parameters.items():
                dict(plain.named_parameters())[name].copy_(parameter)
        weights.begin_backward(version, 1)
        module(x).sum().backward()
        weights.end_backward(version, 1)
        plain.zero_grad()
        plain(x).sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights._gradients[1][name], parameter.grad)
        weights._gradients.clear()


# Refused


class Keeping(nn.Module):
    """Holds a weight in a list too, as if it were looked up faster there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.fast = [self.linear.weight]


class Odd(nn.Parameter):
    """Not just a parameter."""


class WithOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Odd(torch.ones(3))


class DistributedDataParallel(nn.Module):
    """Like torch's: reduces the gradients of the parameters that it was made with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_parameters_that_cannot_take_turns_are_refused() -> None:
    refused: list[tuple[nn.Module, str]] = [
        (Keeping(), "the stage keeps linear.weight in 'fast' too, where it would not be replaced; look it up where"),
        (WithOdd(), "weight is a Odd, no plain parameter; shard it under a synchronous schedule"),
        (DistributedDataParallel(nn.Linear(3, 3)), "DistributedDataParallel keeps those that it was made with"),
        (nn.Sequential(Keeping()), "0 keeps 0.linear.weight in 'fast' too"),
    ]
    for module, message in refused:
        with pytest.raises(ValueError, match="weights are kept in 2 versions, each with parameters") as caught:
            VersionedWeights(module, 2)
        assert message in str(caught.value)
        SingleWeights(module)


def test_sharded_parameters_are_refused() -> None:
    """As ``fully_shard`` leaves them in a module."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match="weight is a DTensor, no plain parameter; shard it under a synchronous"):
            VersionedWeights(module, 2)
    finally:
        dist.destroy_process_group()
