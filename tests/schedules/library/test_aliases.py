"""Schedules answer to the names that papers and torch.distributed.pipelining give them."""

import pytest

from stagewright.schedules.registry import find


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("naive", "none"),
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("pipedream-flush", "1f1b"),
        ("dapple", "1f1b"),
        ("vpp", "interleaved"),
        ("interleaved-1f1b", "interleaved"),
        ("Interleaved1F1B", "interleaved"),
        ("looped-bfs", "bfs"),
        ("LoopedBFS", "bfs"),
        ("breadth_first", "bfs"),
        ("ZB_H1", "zb-h1"),
        ("ZBH2", "zb-h2"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("grouped-interleaved", "gis"),
        ("pipedream-2bw", "2bw"),
    ],
)
def test_alias(alias: str, name: str) -> None:
    assert find(alias).name == name
