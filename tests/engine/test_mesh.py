"""Meshes: where a rank lies, on threads and on processes, and what is refused."""

from typing import Any

import pytest
from launching import launch_on
from meshes import place, use_mesh_of, use_own_mesh
from plain import train_plainly

from stagewright.engine import RankContext, make_mesh
from stagewright.engine.mesh import connect
from stagewright.engine.transport.group import Alone


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 1), (1, 4)])
def test_ranks_of_a_stage_lie_next_to_each_other(kind: Any, pp: int, dp: int) -> None:
    for rank, (where, numbers, of_pipeline, of_replicas, rows, value) in enumerate(launch_on(kind, place, 4, (pp, dp))):
        row, column = divmod(rank, dp)
        assert where == (row, column)
        assert numbers == (row, pp, column, dp, pp, dp, 4)
        assert of_pipeline == [other * dp + column for other in range(pp)]
        assert of_replicas == [(row * dp + other, row * dp + other + 1) for other in range(dp)]
        assert rows == [[row * dp + other, 7] for other in range(dp)]
        assert value == [row * dp - 2.5, 0.0]
        assert str(value[1]) == "-0.0"


def refuse(context: RankContext, sizes: dict[str, int]) -> str:
    with pytest.raises(ValueError, match="ranks") as caught:
        make_mesh(**sizes, context=context)
    return str(caught.value)


def test_sizes_whose_product_is_not_the_number_of_ranks_are_refused() -> None:
    for message in launch_on("threads", refuse, 3, ({"pp": 2, "dp": 2},)):
        assert message == ("a mesh has pp x dp x tp = 2 x 2 x 1 = 4 ranks: here are 3; give numbers whose product is 3")
    assert "2 x 0 x 1" in launch_on("threads", refuse, 2, ({"pp": 2, "dp": 0},))[0]
    assert "thread ranks cannot share" in launch_on("threads", refuse, 2, ({"pp": 1, "tp": 2},))[0]


def test_without_ranks_there_is_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"initialize torch.distributed, or give the context"):
        make_mesh(pp=1)
    transport, group = connect(None)
    assert (transport.num_ranks, type(group)) == (1, Alone)


def test_a_mesh_of_the_trainers_own_serves_as_well() -> None:
    assert launch_on("gloo", use_own_mesh, 4) == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]


CROOKED = [
    ([[3, 0], [1, 2]], "'pp' of a mesh, for torch.distributed sorts those of every group: got [3, 1]; make the mesh "),
    ([[1, 0], [2, 3]], "'dp' of a mesh, for torch.distributed sorts those of every group: got [1, 0]; make the mesh "),
    ([[1, 0], [3, 2]], "got [1, 0]; make the mesh with [0, 1] there, or with make_mesh(pp=…, dp=…)"),
    ([[2, 3], [0, 1]], "'pp' of a mesh, for torch.distributed sorts those of every group: got [2, 0]; make the mesh "),
]


def test_a_mesh_whose_ranks_do_not_ascend_is_refused_on_all_and_every_other_one_trains() -> None:
    """torch sorts the ranks of every group, and would connect other pipelines than those of the mesh."""
    grids = [*(grid for grid, _ in CROOKED), [[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    (said,) = {tuple(of_rank) for of_rank in launch_on("gloo", use_mesh_of, 4, (grids, ("pp", "dp")))}
    for (_, message), refusal in zip(CROOKED, said):
        assert refusal.startswith("ranks ascend along the dimension ")
        assert message in refusal
    expected = f"{train_plainly(2, 9, 1).losses[0]:.12f}"
    assert list(said[len(CROOKED) :]) == [expected, expected]
