"""Programs from elsewhere, however odd: they are read, proved and simulated, or refused with a ScheduleError."""

from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagewright.schedules import Costs, Program, ScheduleError, complete, create, simulate, verify
from stagewright.schedules.program import MAX_CHARACTERS

KINDS: Final = (
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "REDUCE_TIED",
    "STEP@", "F0@", "B0@", "FOO", "",
)  # fmt: skip
NUMBERS: Final = st.sampled_from(["", "0", "1", "2", "7", "-1", "00", "999999999", "9" * 30, "9" * 5000, "٣", "²"])
TOKENS: Final = st.builds(lambda one, kind, other: one + kind + other, NUMBERS, st.sampled_from(KINDS), NUMBERS)
CELLS: Final = st.one_of(
    TOKENS,
    st.builds("({};{})OVERLAP_F_B".format, TOKENS, TOKENS),
    st.sampled_from(["SYNC_SCALARS", "0F0", "0B0", "1F0", "1B0", "(0F1;0B0)OVERLAP_F_B", "(" * 1000, "\x00", "\u2028"]),
    st.text(max_size=4),
)
NAMES: Final = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev", "2bw", "pipedream")


def treat(text: str) -> None:
    """All that is done with a program from elsewhere, as far as it comes; anything but a ScheduleError goes through."""
    try:
        program = Program.from_csv(text)
        assert Program.from_csv(program.to_csv()).streams == program.streams
        verify(program)
        simulate(program, Costs())
    except ScheduleError:
        return


@settings(max_examples=150)
@given(st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=4).map("\n".join) | st.text(max_size=60))
@example("9" * 5000 + "F0,0B0")
@example("0F0,0B0,999999999SEND_F0")
@example("0F0,0B0,0STEP@" + "9" * 4000)
@example("0F0,0B0,999999999REDUCE_GRAD")
@example("0F0,0B0,0SEND_F999999999")
@example("0F0@999999999,0B0@999999999")
@example("(" * 100_000)
def test_nothing_but_schedule_errors_comes_of_any_text(text: str) -> None:
    treat(text)


@settings(max_examples=150)
@given(st.data())
def test_nothing_but_schedule_errors_comes_of_damage(data: st.DataObject) -> None:
    """Cells of a real program are lost, doubled, replaced, or take each other's place."""
    program = create(data.draw(st.sampled_from(NAMES)), num_ranks=2, num_microbatches=4).program()
    rows = [line.split(",") for line in program.to_csv().splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        column, other = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["lose", "double", "replace", "exchange", "borrow"])):
            case "lose" if len(row) > 1:
                row.pop(column)
            case "double":
                row.insert(other, row[column])
            case "replace":
                row[column] = data.draw(CELLS)
            case "borrow":
                row[column] = data.draw(st.sampled_from([cell for line in rows for cell in line]))
            case _:
                row[column], row[other] = row[other], row[column]
    treat("\n".join(map(",".join, rows)))


@settings(max_examples=100)
@given(st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=3).map("\n".join))
def test_what_is_completed_is_a_program_or_a_schedule_error(text: str) -> None:
    """Computations alone get their sends, receives and updates, as ``Pipeline`` and ``stagewright verify`` do it."""
    try:
        verify(complete(Program.from_csv(text)))
    except ScheduleError:
        return


def test_a_text_without_end_is_refused_before_it_is_read() -> None:
    with pytest.raises(ScheduleError, match=f"{MAX_CHARACTERS + 1} characters are too many for a program: at most"):
        Program.from_csv("," * (MAX_CHARACTERS + 1))
