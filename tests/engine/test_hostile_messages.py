"""What other ranks tell beside tensors: whatever it is, it is read, or refused with a ValueError."""

import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagewright.engine.roll_call import Answer, read_answer
from stagewright.engine.timing.trace import Record

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda members: st.lists(members, max_size=3) | st.dictionaries(st.text(max_size=3), members, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), st.text()), st.text())
def test_an_answer_is_read_as_it_was_given(arguments: dict[str, str], refusal: str) -> None:
    assert read_answer(json.dumps([arguments, refusal]), "rank 1") == Answer(arguments, refusal)


@given(JSON.map(json.dumps) | st.text(max_size=20))
@example("[" * 100_000)
@example("1" * 5000)
@example('[{"seed": 1}, ""]')
@example('[{}, "", "from a later version"]')
def test_what_is_no_answer_is_refused_with_its_rank(text: str) -> None:
    with suppress(json.JSONDecodeError, RecursionError):
        match json.loads(text) if len(text) < 1000 else None:
            case [dict() as arguments, str()] if all(isinstance(said, str) for said in arguments.values()):
                return
    with pytest.raises(ValueError, match="rank 1 has not answered what it is about to run"):
        read_answer(text, "rank 1")


@given(st.text(max_size=10), st.floats(allow_nan=False), st.lists(st.floats(allow_nan=False), max_size=4), st.data())
def test_a_damaged_record_is_a_record_or_a_value_error(
    machine: str, clock: float, times: list[float], data: st.DataObject
) -> None:
    record = Record(machine, clock, tuple(times))
    written = bytearray(record.to_bytes())
    assert Record.from_bytes(bytes(written)) == record
    written[data.draw(st.integers(0, len(written) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        Record.from_bytes(bytes(written))
    with pytest.raises(ValueError, match="."):
        Record.from_bytes(bytes(written)[: data.draw(st.integers(0, 15))])


@given(st.binary(max_size=80))
def test_nothing_but_value_errors_comes_of_noise(noise: bytes) -> None:
    with suppress(ValueError):
        Record.from_bytes(noise)
