"""Versions: several generations of a stage's weights, between which its module switches without a copy."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from stagewright.engine.updates.weights import LOW_PRECISION, like, master_of

# Where a parameter is looked up: the dict, the key there, and the parameter's name.
Slot: TypeAlias = tuple[dict[str, nn.Parameter | None], str, str]

# Every parameter of a version starts at a multiple of as many bytes, as it would in memory of its own.
_ALIGNMENT: Final = 64
# These hold on to the parameters, or to their gradients, that they were made with.
_WRAPPERS: Final = ("DistributedDataParallel", "FullyShardedDataParallel")


class VersionedWeights:
    """Several versions, each with leaf parameters of its own over a flat buffer of its own, one a dtype.

    Before each forward and backward the version's parameters are put into the module's slots: a recomputation reads
    them too, and autograd's version counter guards the buffers. All versions share one gradient an update.

    Args:
        module: the stage; frozen parameters and buffers have one version.
        num_versions: how many are kept.
        master: as for ``SingleWeights``.

    Raises:
        ValueError: a parameter is no plain one, such as that of a sharded module, or is not looked up where it was
            registered.
    """

    def __init__(self, module: nn.Module, num_versions: int, *, master: bool = False) -> None:
        parameters = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        check_plain(module, parameters, num_versions)
        self._slots = _slots_of(module)
        self._recurrent = [submodule for submodule in module.modules() if isinstance(submodule, nn.RNNBase)]
        self._versions = [_Version(parameters) for _ in range(num_versions)]
        self._has_masters = {name: master and weight.dtype in LOW_PRECISION for name, weight in parameters.items()}
        self.trained = {
            name: master_of(weight) if self._has_masters[name] else _alias(weight)
            for name, weight in self._versions[0].parameters.items()
        }
        self._gradients: dict[int, dict[str, Tensor]] = {}
        self._delays: dict[int, int] = {}  # by update, that of its gradients
        self.delay = 0
        self._turn = 0  # by how much a version's number is higher than that of its buffer, before they go round
        self.newest = 0
        self.use(None)

    def use(self, version: int | None) -> None:
        """Put a version's parameters into the module's slots; the newest ones where None."""
        parameters = self._parameters_of(version)
        for holder, slot, name in self._slots:
            holder[slot] = parameters[name]
        for recurrent in self._recurrent:  # else it would gather its parameters anew, in other memory
            current = [getattr(recurrent, slot) for slot in recurrent._flat_weights_names]
            vars(recurrent).update(_flat_weights=current, _flat_weight_refs=[weakref.ref(weight) for weight in current])

    def begin_backward(self, version: int, update: int) -> None:
        """Lend the version's parameters the sum of gradients to which autograd shall add."""
        self.use(version)
        self._delays[update] = update - 1 - version
        gradients = self._gradients.setdefault(update, {})
        for name, parameter in self._of(version).parameters.items():
            if not self._has_masters[name]:
                parameter.grad = gradients.get(name)

    def end_backward(self, version: int, update: int) -> None:
        """Take the sum back."""
        gradients = self._gradients[update]
        for name, parameter in self._of(version).parameters.items():
            if parameter.grad is None:
                continue
            if not self._has_masters[name]:
                gradients[name] = parameter.grad
            elif name in gradients:
                gradients[name].add_(parameter.grad)
            else:
                gradients[name] = parameter.grad.float()
            parameter.grad = None

    def bring_gradients(self, update: int) -> None:
        """Give the optimizer's parameters the gradients of an update."""
        self.delay = self._delays.pop(update, self.delay)
        for name, gradient in self._gradients.pop(update, {}).items():
            self.trained[name].grad = gradient

    def begin_update(self, version: int) -> None:
        """Copy the newest version into the buffer that is free, and let the optimizer train that."""
        newest, free = self._of(self.newest), self._of(version)
        with torch.no_grad():
            for dtype, flat in newest.flats.items():
                if not all(self._has_masters[name] for name in newest.names[dtype]):
                    free.flats[dtype].copy_(flat)
        for name, parameter in free.parameters.items():
            if not self._has_masters[name]:
                self.trained[name].data = parameter.data
        self.newest = version

    def publish(self) -> None:
        """Round the masters into the newest version."""
        with torch.no_grad():
            for parameter, master in self.masters.values():
                parameter.copy_(master)

    def clear(self) -> None:
        """Forget the gradients of a batch that has failed."""
        self._gradients.clear()
        self._delays.clear()
        for version in self._versions:
            for parameter in version.parameters.values():
                parameter.grad = None

    def frozen_since(self) -> Sequence[str]:
        """What a trainer has frozen in the module, which holds one version at a time."""
        parameters = [pair for version in self._versions for pair in version.parameters.items()]
        return [name for name, parameter in parameters if not parameter.requires_grad]

    @property
    def masters(self) -> Mapping[str, tuple[nn.Parameter, nn.Parameter]]:
        """By name, what the newest version computes with, and what the optimizer trains in its place."""
        newest = self._of(self.newest).parameters
        return {name: (newest[name], self.trained[name]) for name, has in self._has_masters.items() if has}

    def older_versions(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The values of those that are kept beside the newest one, by number."""
        numbers = range(max(self.newest + 1 - len(self._versions), 0), self.newest)
        return {
            number: {name: parameter.detach() for name, parameter in self._of(number).parameters.items()}
            for number in numbers
        }

    def renumber(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from here as if what the module holds were the given version, and those before it these."""
        self.clear()
        self._turn += newest - self.newest
        self.newest = newest
        with torch.no_grad():
            for number, values in older.items():
                for name, parameter in self._of(number).parameters.items():
                    parameter.copy_(values[name])

    def _parameters_of(self, version: int | None) -> Mapping[str, nn.Parameter]:
        return self._of(self.newest if version is None else version).parameters

    def _of(self, version: int) -> "_Version":
        return self._versions[(version - self._turn) % len(self._versions)]


class _Version:
    """One version.

    Args:
        parameters: whose values it takes at first, and in whose place it stands.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.flats: dict[torch.dtype, Tensor] = {}
        self.names: dict[torch.dtype, list[str]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
            chosen = {name: parameter for name, parameter in parameters.items() if parameter.dtype == dtype}
            sizes = [_aligned(parameter) for parameter in chosen.values()]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(chosen.values())).device)
            for (name, parameter), part in zip(chosen.items(), torch.split(flat, sizes)):
                place = part[: parameter.numel()].view(parameter.shape)
                place.copy_(parameter.detach())
                self.parameters[name] = like(parameter, place, hooks=True)
            self.flats[dtype], self.names[dtype] = flat, list(chosen)


def check_plain(module: nn.Module, trained: Mapping[str, nn.Parameter], num_versions: int) -> None:
    """Refuse parameters in whose place no others can be put.

    Raises:
        ValueError: there are some, and why.
    """
    reason = f"weights are kept in {num_versions} versions, each with parameters of its own, which take turns"
    for path, submodule in module.named_modules():
        if type(submodule).__name__ in _WRAPPERS:
            raise ValueError(
                f"{reason}: {type(submodule).__name__} keeps those that it was made with ({path or 'the stage'}); "
                "leave it out, or take a synchronous schedule"
            )
    for name, parameter in trained.items():
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{reason}: {name} is a {type(parameter).__name__}, no plain parameter; shard it under a synchronous "
                "schedule"
            )
    name_of = {parameter: name for name, parameter in trained.items()}
    for path, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if attribute in ("_parameters", "_flat_weights"):
                continue
            for held in _parameters_in(value):
                if held in name_of:
                    raise ValueError(
                        f"{reason}: {path or 'the stage'} keeps {name_of[held]} in {attribute!r} too, where it would "
                        "not be replaced; look it up where it is registered"
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """The parameters that an attribute holds by itself, in a list, a tuple or a dict."""
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, Mapping | list | tuple | set):
        members: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        for member in members:
            yield from _parameters_in(member)


def _slots_of(module: nn.Module) -> Sequence[Slot]:
    """Where the trained parameters of a module are looked up.

    A parameter that several submodules share has several slots and one name.
    """
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    return [
        (submodule._parameters, slot, name_of[parameter])
        for submodule in module.modules()
        for slot, parameter in submodule._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter over the same memory, which can move on to that of another version."""
    alias = like(parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))
    alias.data = parameter.data
    return alias


def _aligned(parameter: nn.Parameter) -> int:
    """Elements that a parameter takes of a flat buffer."""
    step = max(_ALIGNMENT // parameter.itemsize, 1)
    return -(-parameter.numel() // step) * step
