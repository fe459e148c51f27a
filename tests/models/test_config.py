"""The shape of a GPT, and the shapes it refuses."""

import math
import re
from typing import Any

import pytest

from stagewright.models import GPTConfig


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1: got 0; pass 1 or more"),
        ({"vocab_size": -5}, "vocab_size must be at least 1: got -5"),
        ({"sequence_length": 0}, "sequence_length must be at least 1: got 0"),
        (
            {"hidden_size": 128, "num_heads": 3},
            "num_heads must divide hidden_size: got 3 heads for a hidden size of 128; "
            "use 2 heads, or a hidden size of 129",
        ),
        ({"hidden_size": 2, "num_heads": 4}, "use 2 heads, or a hidden size of 4"),
        ({"dropout": 1.0}, "at least 0 and below 1: got 1.0; pass 0 to switch it off"),
        ({"dropout": -0.1}, "at least 0 and below 1: got -0.1"),
        ({"dropout": math.nan}, "at least 0 and below 1: got nan"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_rule_numbers_and_remedy(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GPTConfig(**sizes)


@pytest.mark.parametrize("size", [2.5, "4", True])
def test_a_size_that_is_not_an_integer_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"num_layers must be an integer: got {size!r}")):
        GPTConfig(num_layers=size)
