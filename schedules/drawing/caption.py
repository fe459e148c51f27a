"""Caption: the sentences under a picture."""

from stagewright.schedules.costs import Costs
from stagewright.schedules.timeline import Timeline


def caption_of(timeline: Timeline) -> list[str]:
    """The shape and the bubble of a timeline, each ratio with its denominator."""
    program = timeline.program
    shape = [
        counted(program.num_ranks, "rank"),
        counted(program.num_stages, "stage"),
        counted(program.num_microbatches, "microbatch", "microbatches"),
    ]
    if program.num_batches > 1:
        shape.append(counted(program.num_batches, "batch", "batches"))
    sentences = [
        f"{', '.join(shape)}; makespan {timeline.makespan:g}.",
        f"Bubble fraction {timeline.bubble_fraction:.1%} = idle / (ranks × makespan); "
        f"bubble overhead {timeline.bubble_overhead:.1%} = (makespan − ideal) / ideal.",
    ]
    if program.num_batches > 2:
        sentences.append(
            f"Steady period {timeline.steady_period:g} a batch; steady bubble {timeline.steady_bubble:.1%} = "
            "(period − ideal) / period."
        )
    return sentences


def counted(count: int, noun: str, nouns: str = "") -> str:
    """A number with its noun in the singular or the plural."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def memory_unit(costs: Costs) -> str:
    """What a memory curve counts: by default the costs' bytes are such that it counts stashes."""
    default = Costs()
    counts_stashes = (costs.activation_bytes, costs.weight_bytes) == (default.activation_bytes, default.weight_bytes)
    return "stashes" if counts_stashes else "bytes"
