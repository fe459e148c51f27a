"""The cut that makes the slowest stage as fast as can be: an exact min-max partition of a chain.

A pipeline is as fast as its slowest stage, so the greatest cost of a stage is what counts. Splitting a sequence into
contiguous pieces so that the greatest sum is least is a classic of dynamic programming (Skiena, "The Algorithm Design
Manual", section "The Partition Problem"; PipeDream, section 3.1, does it with replicas).
"""

from collections.abc import Sequence
from itertools import accumulate

from stagewright.models.build import CuttableModel, check_model
from stagewright.models.checks import finite_number, in_order
from stagewright.models.cut import Cut, Part, check_enough, check_parts, count_layers


def cut_by_costs(parts: Sequence[Part], costs: Sequence[float], num_stages: int) -> Cut:
    """Cut so that the greatest cost of a stage is least; see `min_max_sizes`.

    `costs` has one number a part, embedding and head included, so that either may get a stage of its own where that is
    best. Raises `ValueError` for costs that do not fit the model, and when there are fewer layers than stages, and
    `TypeError` for what are no numbers.
    """
    check_parts(parts)
    costs = _numbers(costs)
    if len(costs) != len(parts):
        raise ValueError(
            f"every part of the model has one cost: got {len(costs)} costs for {len(parts)} parts, "
            f"{parts[0].name} to {parts[-1].name}; pass one for each, embedding and head too"
        )
    num_stages = check_enough(count_layers(parts), num_stages)
    return Cut(min_max_sizes(costs, num_stages))


def cut_by_parameters(model: CuttableModel, num_stages: int) -> Cut:
    """Cut so that the stage with most parameters has as few as can be. Raises as `cut_by_costs` does."""
    check_model(model)
    return cut_by_costs(model.parts, model.num_parameters(), num_stages)


def min_max_sizes(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """How many of a sequence of costs each stage gets, so that the greatest sum of a stage is least.

    No stage is empty. Of several such cuts it is the one whose sums have the least sum of squares, so that the others
    are even too; and of those the one whose first stages have fewest, because the later ones keep fewer microbatches
    in flight. Sums are exact, so rounding decides nothing, and every machine finds the same cut.

    Raises `ValueError` for a cost that is no finite number of 0 or more, and for fewer costs than stages.
    """
    costs = _numbers(costs)
    num_stages = check_enough(len(costs), num_stages)
    sums = (0, *accumulate(as_whole_numbers(costs)))
    return evenest_sizes(sums, num_stages, least_greatest(sums, num_stages))


def _numbers(costs: Sequence[float]) -> list[float]:
    given = in_order(costs, "costs are one number a part, such as (1.0, 2.5)")
    return [finite_number(cost, f"number {index}") for index, cost in enumerate(given)]


def as_whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same costs in a unit in which all of them are whole numbers; no digit is lost."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max((denominator for _, denominator in ratios), default=1)  # powers of 2, so the others divide it
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def least_greatest(sums: Sequence[int], num_stages: int) -> int:
    """The least greatest cost of a stage; `sums[i]` is the cost of the first i parts.

    `best[end]` is the answer for the first `end` parts and so many stages as have been added.
    """
    num_parts = len(sums) - 1
    best = list(sums)
    for stage in range(1, num_stages):
        previous, best = best, list(sums)
        for end in range(stage + 1, num_parts + 1):
            crossing = first_heavier(previous, sums, stage, end)
            starts = range(max(crossing - 1, stage), min(crossing, end - 1) + 1)
            best[end] = min(max(previous[start], sums[end] - sums[start]) for start in starts)
    return best[num_parts]


def first_heavier(previous: Sequence[int], sums: Sequence[int], stage: int, end: int) -> int:
    """The first start of a stage that ends at `end` where the stages before it cost as much as itself, or more.

    What is before grows with the start and the stage itself shrinks, so the best start is this one or the one before.
    """
    low, high = stage, end
    while low < high:
        start = (low + high) // 2
        if previous[start] >= sums[end] - sums[start]:
            high = start
        else:
            low = start + 1
    return low


def evenest_sizes(sums: Sequence[int], num_stages: int, limit: int) -> tuple[int, ...]:
    """Of all cuts into stages of at most `limit` the one with the least squares, its first stages as small as can be.

    `squares[start]` is the least sum of squares of the parts from `start` on, in as many stages as have been added
    from the end; None where no cut keeps the limit. `ends` says where the first of these stages ends.
    """
    num_parts = len(sums) - 1
    squares: list[int | None] = [None] * num_parts + [0]
    ends: list[list[int]] = []
    for _ in range(num_stages):
        after, squares = squares, [None] * (num_parts + 1)
        ends.append([num_parts] * (num_parts + 1))
        for start in range(num_parts):
            squares[start], ends[-1][start] = least_squares(sums, after, start, limit)
    sizes, start = [], 0
    for ends_here in reversed(ends):
        sizes.append(ends_here[start] - start)
        start = ends_here[start]
    return tuple(sizes)


def least_squares(sums: Sequence[int], after: Sequence[int | None], start: int, limit: int) -> tuple[int | None, int]:
    """The least sum of squares of a stage from `start` on and those after it, and where that stage ends."""
    least, least_end = None, start
    for end in range(start + 1, len(sums)):
        cost, rest = sums[end] - sums[start], after[end]
        if cost > limit:
            break
        if rest is not None and (least is None or cost * cost + rest < least):
            least, least_end = cost * cost + rest, end
    return least, least_end
