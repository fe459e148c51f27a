"""Lists of machines as SLURM writes them."""

import pytest

from stagewright.engine.nodelist import expand_nodelist


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],gpu2", ["node01", "node02", "node03", "node07", "gpu2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a,b-2,c[3]", ["a", "b-2", "c3"]),
        ("rack[1-2]n[1,3]-ib", ["rack1n1-ib", "rack1n3-ib", "rack2n1-ib", "rack2n3-ib"]),
    ],
)
def test_every_node_of_a_list_in_its_order(text: str, nodes: list[str]) -> None:
    assert list(expand_nodelist(text)) == nodes


@pytest.mark.parametrize("text", ["", "n[", "n[]", "n[1-2", "n1]", "a,,b", "a,", "a b", "n[x]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a list of nodes looks like node\[01-03,07\],gpu2: got"):
        expand_nodelist(text)


@pytest.mark.parametrize("item", ["3-1", "1-", "-1", "1-2-3"])
def test_numbers_rise(item: str) -> None:
    with pytest.raises(ValueError, match=f"numbers of nodes rise, as in 01-16: got '{item}'"):
        expand_nodelist(f"n[{item}]")
