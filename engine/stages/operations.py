"""Operations: those on a parameter whose weight gradient can wait, and how it is made.

``OPERATIONS`` is the table: torch's function -> what reads its arguments into a ``Call``. A linear map stands for most
of a transformer; what is not in the table gets its weight gradient together with its input gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# dx, dw, db; what was not asked for is not there
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Operation(ABC):
    """y = operation(x, weight, bias), and its derivatives, each on its own."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dx."""

    @abstractmethod
    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""

    @abstractmethod
    def bias_gradient(self, dy: Tensor) -> Tensor:
        """db."""

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += dw."""
        total.add_(self.weight_gradient(dy, x, weight))


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """y = x @ weight.T + bias, or x @ weight + bias where the weight lies the other way round.

    Args:
        transposed: the weight is (in, out), as in ``x @ weight``, and not (out, in).
    """

    transposed: bool = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y."""
        if not self.transposed:
            return functional.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dx."""
        return dy @ (weight.t() if self.transposed else weight)

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""
        left, right = self._factors(dy, x)
        return torch.mm(left, right)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """db."""
        return _rows(dy).sum(0)

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += dw, without a dw of its own where the types allow it."""
        left, right = self._factors(dy, x)
        if total.dtype == left.dtype == right.dtype:
            total.addmm_(left, right)
        else:
            total.add_(left @ right)

    def _factors(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dy, x = _rows(dy), _rows(x)
        return (x.t(), dy) if self.transposed else (dy.t(), x)


@dataclass(frozen=True, slots=True)
class Convolution(Operation):
    """y = convolution of x with the weight, over one to three dimensions.

    Args:
        function: torch.conv1d, conv2d or conv3d.
        stride, padding, dilation: one number a dimension.
        groups: of channels.
    """

    function: Callable[..., Tensor]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y."""
        return self.function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dx."""
        return self._backward(dy, x, weight, (True, False, False))[0]

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""
        return self._backward(dy, x, weight.to(dy.dtype), (False, True, False))[1]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """db."""
        return dy.sum([dimension for dimension in range(dy.ndim) if dimension != 1])

    def _backward(self, dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> Gradients:
        no_padding = [0] * len(self.stride)
        settings = (self.stride, self.padding, self.dilation, False, no_padding, self.groups)
        gradients: Gradients = torch.ops.aten.convolution_backward(dy, x, weight, None, *settings, wanted)
        return gradients


@dataclass(frozen=True, slots=True)
class Lookup(Operation):
    """y = weight[x], with integers x: an embedding.

    Args:
        padding: the row that gets no gradient; -1 for none.
        scale: divide by how often a row occurs.
    """

    padding: int
    scale: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y."""
        return functional.embedding(x, weight)

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """There is none: x is made of integers."""
        raise TypeError("an embedding has no gradient for its integers")

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dw."""
        dw: Tensor = torch.ops.aten.embedding_dense_backward(dy, x, weight.shape[0], self.padding, self.scale)
        return dw

    def bias_gradient(self, dy: Tensor) -> Tensor:
        """There is none."""
        raise TypeError("an embedding has no bias")


# operation, x, weight, bias; None where this call is none that can wait
Call: TypeAlias = tuple[Operation, Any, Any, Any] | None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return (Linear(), input, weight, bias) if weight.ndim == 2 else None


def _product(input: Any, other: Any) -> Call:
    is_matrix = isinstance(other, Tensor) and other.ndim == 2
    return (Linear(transposed=True), input, other, None) if is_matrix else None


def _product_and_sum(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Call:
    return (Linear(transposed=True), mat1, mat2, input) if beta == alpha == 1 and input.ndim == 1 else None


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call:
    if max_norm is not None or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Lookup(padding, scale_grad_by_freq), input, weight, None


class _Convolutions:
    """Reads the arguments of one of torch's convolutions."""

    def __init__(self, function: Callable[..., Tensor], num_dimensions: int) -> None:
        self._function = function
        self._num_dimensions = num_dimensions

    def __call__(
        self,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call:
        if isinstance(padding, str) or input.ndim != self._num_dimensions + 2:
            return None
        settings = (self._each(stride), self._each(padding), self._each(dilation), groups)
        return Convolution(self._function, *settings), input, weight, bias

    def _each(self, setting: Any) -> Sequence[int]:
        numbers = (setting,) if isinstance(setting, int) else tuple(setting)
        return numbers * self._num_dimensions if len(numbers) == 1 else numbers


OPERATIONS: Final[Mapping[Any, Callable[..., Call]]] = MappingProxyType(
    {
        torch._C._nn.linear: _linear,
        torch.addmm: _product_and_sum,
        torch.mm: _product,
        torch.matmul: _product,
        Tensor.matmul: _product,
        Tensor.__matmul__: _product,
        Tensor.mm: _product,
        torch.conv1d: _Convolutions(torch.conv1d, 1),
        torch.conv2d: _Convolutions(torch.conv2d, 2),
        torch.conv3d: _Convolutions(torch.conv3d, 3),
        functional.embedding: _embedding,
    }
)
