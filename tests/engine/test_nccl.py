"""The NCCL transport finds the right communicators and peers; gloo plays NCCL's part where there is no GPU."""

import pytest
from launching import MAX_RANKS, launch_on
from plain import assert_same, train_plainly
from pretend_nccl import train_over_groups

from stagewright.schedules import create


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera"])
def test_every_direction_between_two_ranks_has_a_group_of_its_own(name: str) -> None:
    """These schedules send both activations and gradients in both directions, and the last one's replicas too."""
    schedule = create(name, num_ranks=MAX_RANKS, num_microbatches=8)
    results = launch_on("gloo", train_over_groups, MAX_RANKS, (17, 2, {"schedule": schedule}))
    assert_same(results, train_plainly(schedule.num_stages, 17, 2))
