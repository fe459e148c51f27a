"""Where ranks sum tied gradients and agree on scalars."""

import pytest

from stagewright.schedules import ScheduleError, create, find, insert_agreements, names, verify
from stagewright.schedules.schedule import Schedule


def schedule(name: str, num_microbatches: int = 8) -> Schedule:
    return create(name, num_ranks=4, num_microbatches=num_microbatches)


def test_the_tied_gradient_leaves_with_the_last_backward_and_scalars_stand_before_the_steps() -> None:
    program = insert_agreements(schedule("1f1b", 4).program(), tied_stages=(0, 3), scalars=True)
    ends = [",".join(map(str, stream[-4:])) for stream in program.streams]
    assert ends == [
        "0B3,0REDUCE_TIED,SYNC_SCALARS,0STEP@1",
        "1B3,1SEND_B3,SYNC_SCALARS,1STEP@1",
        "2B3,2SEND_B3,SYNC_SCALARS,2STEP@1",
        "3REDUCE_TIED,3SEND_B3,SYNC_SCALARS,3STEP@1",
    ]


@pytest.mark.parametrize("name", [name for name in names() if find(name).synchronous])
@pytest.mark.parametrize("steps", [1, 2])
def test_every_schedule_stays_legal(name: str, steps: int) -> None:
    program = schedule(name).program(steps)
    agreed = insert_agreements(program, tied_stages=(0, program.num_stages - 1), scalars=True)
    verify(agreed)
    assert sum(token == "SYNC_SCALARS" for token in agreed.to_csv().replace("\n", ",").split(",")) == 4 * steps


def test_a_step_without_its_scalars_is_refused() -> None:
    text = insert_agreements(schedule("gpipe").program(), scalars=True).to_csv()
    program = type(schedule("gpipe").program()).from_csv(text.replace("SYNC_SCALARS,2STEP@1", "2STEP@1"))
    with pytest.raises(ScheduleError, match="2STEP@1 .* has no SYNC_SCALARS before it"):
        verify(program)
