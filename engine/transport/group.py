"""Group: the same rank of every replica of a pipeline, under data parallelism, and the sums that these make together.

All of them run the same program, so all call this alike and in one order. A sum is the same on all to the last bit.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stagewright.engine.transport.contract import Transport


class Sum(Protocol):
    """A sum that has begun."""

    def wait(self) -> Tensor:
        """Block until it is there, or on a device let what comes next come after it.

        Raises:
            PeerError: a rank of another replica has failed.
        """
        ...


class Group(Protocol):
    """The same rank of all replicas."""

    @property
    def rank(self) -> int:
        """This replica."""
        ...

    @property
    def size(self) -> int:
        """Replicas."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors that are summed live."""
        ...

    def start_sum(self, tensor: Tensor) -> Sum:
        """Begin to sum a tensor, of one shape and type on all, over the replicas; the sum takes it for its own."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the others, where that is possible, that this replica has failed and why."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A transport that can connect some of its ranks apart, where torch.distributed knows nothing of them."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        ...

    def mesh(self, rows: Sequence[int], column: Sequence[int]) -> tuple[Transport, Group]:
        """Connections among some of the ranks; every rank calls this alike.

        Args:
            rows: the ranks of this one's replica of a pipeline.
            column: the same rank of all replicas.
        """
        ...


class Alone:
    """The group of a pipeline without replicas.

    Args:
        device: of its rank.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.device = device or torch.device("cpu")

    def start_sum(self, tensor: Tensor) -> Sum:
        """Nothing is to be added."""
        return Done(tensor)

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""


class Done:
    """A sum that is there.

    Args:
        total: what it is.
    """

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def wait(self) -> Tensor:
        """It is there."""
        return self._total


def start_numbers(group: Group, numbers: Sequence[float]) -> Sum:
    """Begin to add up some numbers."""
    return group.start_sum(torch.tensor(numbers, dtype=torch.float64, device=group.device))


def gather_rows(group: Group, row: Tensor) -> Tensor:
    """The tensors of all replicas, of one shape and type, one a row."""
    rows = torch.zeros((group.size, *row.shape), dtype=row.dtype, device=group.device)
    rows[group.rank] = row
    return group.start_sum(rows).wait()


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Every replica's bytes, in the order of replicas."""
    lengths = [int(length) for length in gather_rows(group, torch.tensor(len(data))).tolist()]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row
    rows = gather_rows(group, row).cpu().numpy()
    return [bytes(of_replica[:length].data) for of_replica, length in zip(rows, lengths)]


def share(group: Group, tensor: Tensor) -> None:
    """Give a tensor the value that it has in the first replica, bit by bit."""
    source = tensor.detach()
    if group.size == 1 or not source.numel():
        return
    bits = source.contiguous().flatten().view(torch.uint8).to(group.device, copy=True)
    if group.rank:
        bits.zero_()
    value = group.start_sum(bits).wait()
    with torch.no_grad():
        source.copy_(value.to(source.device).view(source.dtype).view(source.shape))
