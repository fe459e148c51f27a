"""``verify`` and an interpreter that knows nothing of it agree on thousands of mutated programs."""

from collections import Counter
from itertools import islice

import pytest
from interpreter import run
from mutants import mutants, programs

from stagewright.schedules import Program, ScheduleError, verify
from stagewright.schedules.proof import SEMANTICS


def verdict(program: Program, semantics: str) -> str:
    """What ``verify`` says: the empty string where the program is legal."""
    try:
        verify(program, semantics)
    except ScheduleError as error:
        return f"{error.rule or 'no rule'}: {error}"
    return ""


def compare(count: int, seed: int) -> Counter[str]:
    """Hold both against each other under every semantics; how often each rule, or none, was the verdict."""
    rules: Counter[str] = Counter()
    for name, mutant in islice(mutants(seed), count):
        for semantics in SEMANTICS:
            said, seen = verdict(mutant, semantics), run(mutant, semantics)
            assert bool(said) == bool(seen), (
                f"{name}, {semantics}:\nverify says: {said or 'legal'}\nthe run says: {seen or 'legal'}\n"
                f"{mutant.updates}\n{mutant.to_csv()}"
            )
            rules[said.split(":")[0] or "legal"] += 1
    return rules


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_every_program_itself_runs(semantics: str) -> None:
    for name, program in programs().items():
        assert run(program, semantics) == verdict(program, semantics) == "", name


def test_verify_agrees_with_the_interpreter_on_a_thousand_mutants() -> None:
    rules = compare(1_000, seed=1)
    assert rules["legal"] > 300, "harmless faults must be among them"
    assert len(rules) > 12, f"many rules must be broken: {rules}"


@pytest.mark.slow
def test_verify_agrees_with_the_interpreter_on_ten_thousand_mutants() -> None:
    rules = compare(10_000, seed=2)
    assert set(rules) == {
        "channel order",
        "circular wait",
        "duplicate compute",
        "duplicate message",
        "gradient buffer",
        "gradient missing",
        "leftover",
        "legal",
        "missing compute",
        "placement",
        "receive without send",
        "reduction missing",
        "reduction order",
        "reduction too early",
        "send without receive",
        "sharding",
        "staleness",
        "step order",
        "unknown stage or microbatch",
        "use before production",
        "version mismatch",
        "version not made",
        "version overwritten",
    }
