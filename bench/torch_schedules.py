"""The same work by torch: building its schedules and lowering them to sends and receives.

Torch needs neither tensors nor processes for that, only objects that say which stages there are. It lowers the
schedules of several stages a rank; its GPipe and 1F1B are loops.
"""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from torch.distributed.pipelining.schedules import get_schedule_class

# Our names, and torch's for the same schedule.
TORCH_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bfs": "LoopedBFS",
        "interleaved": "Interleaved1F1B",
        "interleaved-zb": "InterleavedZeroBubble",
        "zbv": "ZBVZeroBubble",
        "dualpipev": "DualPipeV",
    }
)


def build_and_lower(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> int:
    """Let torch build a schedule of ours and lower it, which its constructor does; returns its number of actions."""
    schedule: Any = get_schedule_class(TORCH_NAMES[name])
    stages = [_stage(chunk, num_ranks, num_chunks) for chunk in range(num_chunks)]
    lowered = schedule(stages, num_microbatches).pipeline_order_with_comms
    return sum(len(actions) for actions in lowered.values())


def _stage(chunk: int, num_ranks: int, num_chunks: int) -> SimpleNamespace:
    """What a schedule asks of a stage on rank 0 before it runs."""
    return SimpleNamespace(
        stage_index=chunk * num_ranks,
        num_stages=num_chunks * num_ranks,
        group_size=num_ranks,
        group_rank=0,
        submod=None,
        has_backward=True,
    )
