"""A batch's keyword arguments: what is handed out one a microbatch, uncut."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.engine import PerMicrobatch, Pipeline, RankContext, launch_local
from stagewright.engine.batch import split_keywords


def test_each_microbatch_gets_its_member_itself_beside_what_is_cut_or_shared() -> None:
    members: list[Any] = [{"any": "object"}, torch.arange(7), None]
    parts = split_keywords({"own": PerMicrobatch(members), "cut": torch.arange(6), "all": "text"}, 3, {})
    assert [part["own"] is member for part, member in zip(parts, members)] == [True] * 3
    assert [part["cut"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["all"] for part in parts] == ["text"] * 3


@pytest.mark.parametrize("num_members", [0, 2, 4])
def test_another_number_of_members_than_microbatches_is_refused(num_members: int) -> None:
    message = f"a PerMicrobatch has one member a microbatch: memo has {num_members} for 3 microbatches; give 3"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_keywords({"memo": PerMicrobatch([{}] * num_members)}, 3, {})


class Noting(nn.Module):
    """Adds its number and notes what it has seen."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, memo: dict[int, Any]) -> Tensor:
        memo[self.stage] = x.tolist()
        return x + 10**self.stage


def predict_noting(context: RankContext) -> list[dict[int, Any]]:
    memos: list[dict[int, Any]] = [{}, {}]
    with Pipeline(Noting, schedule="interleaved", num_microbatches=4, transport=context.transport) as pipe:
        pipe.predict(torch.tensor([100_000, 200_000]), num_microbatches=2, memo=PerMicrobatch(memos))
    return memos


def test_all_stages_of_a_rank_share_the_member_of_a_microbatch_and_keep_what_they_put_there() -> None:
    assert launch_local(predict_noting, 2, backend="threads") == [
        [{0: [100_000], 2: [100_011]}, {0: [200_000], 2: [200_011]}],
        [{1: [100_001], 3: [100_111]}, {1: [200_001], 3: [200_111]}],
    ]
