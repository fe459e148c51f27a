"""Lists of machines as SLURM writes them."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.engine.launch.nodelist import first_node


@pytest.mark.parametrize(
    ("text", "node", "is_only"),
    [
        ("node1", "node1", True),
        ("node[01-03,07],gpu2", "node01", False),
        ("gpu2,node[01-03,07]", "gpu2", False),
        ("n[8-11]", "n8", False),
        ("n[098-101]", "n098", False),
        ("n[7,3]", "n7", False),
        ("a,b-2,c[3]", "a", False),
        ("c[3]", "c3", True),
        ("c[03-03]", "c03", True),
        ("c[03-3]x", "c03x", True),
        ("rack[1-2]n[1,3]-ib", "rack1n1-ib", False),
        ("rack[2]n[1,3]-ib", "rack2n1-ib", False),
        ("rack[2]n[1]-ib", "rack2n1-ib", True),
    ],
)
def test_the_first_node_of_a_list_and_whether_it_is_alone(text: str, node: str, is_only: bool) -> None:
    assert first_node(text) == (node, is_only)


@pytest.mark.parametrize("text", ["", "n[", "n[]", "n[1-2", "n1]", "a,,b", "a,", "a b", "n[x]", "n[١]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a list of nodes looks like node\[01-03,07\],gpu2: got"):
        first_node(text)


@pytest.mark.parametrize("item", ["3-1", "1-", "-1", "1-2-3"])
@pytest.mark.parametrize("list_of", ["n[{}]", "a,n[{}]", "a[1],n[1]m[2,{}]"])
def test_numbers_rise_wherever_they_are(item: str, list_of: str) -> None:
    with pytest.raises(ValueError, match=f"numbers of nodes rise, as in 01-16: got '{item}' in "):
        first_node(list_of.format(item))


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("n[1-99999999999]", "n1"),
        ("n[0-999999999999999999]", "n0"),
        ("r[1-999999999]" * 9, "r1" * 9),
        (",".join(["n[1-999999999]"] * 5000), "n1"),
    ],
)
def test_a_list_takes_no_more_memory_than_its_own_length(text: str, node: str) -> None:
    tracemalloc.start()
    assert first_node(text) == (node, False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 + 20 * len(text)


def test_what_is_too_long_is_refused_briefly() -> None:
    with pytest.raises(ValueError, match="numbers of nodes have at most 18 digits: got '1-9999") as caught:
        first_node(f"n[1-{'9' * 5000}]")
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="a list of nodes has at most 1000000 characters: got 1000001"):
        first_node("n" * 1_000_001)
    with pytest.raises(ValueError, match="looks like") as caught:
        first_node("n" * 500_000 + "[")
    assert len(str(caught.value)) < 200


@given(st.text(alphabet="n0123-,[] x", max_size=30))
def test_whatever_is_written_gives_a_node_or_a_value_error(text: str) -> None:
    try:
        node, _ = first_node(text)
    except ValueError:
        return
    assert node
    assert not set(node) & set("[], ")
