"""Caption: the sentences under a picture."""

from stagewright.schedules.costs import Costs
from stagewright.schedules.timeline import Timeline


def caption_of(timeline: Timeline) -> list[str]:
    """The shape and the bubble of a timeline, each ratio with its denominator."""
    sentences = [
        f"{shape_of(timeline)}; makespan {timeline.makespan:g}.",
        f"Bubble fraction {timeline.bubble_fraction:.1%} = idle / (ranks × makespan); "
        f"bubble overhead {timeline.bubble_overhead:.1%} = (makespan − ideal) / ideal.",
    ]
    if timeline.program.num_batches > 2:
        sentences.append(
            f"Steady period {timeline.steady_period:g} a batch; steady bubble {timeline.steady_bubble:.1%} = "
            "(period − ideal) / period."
        )
    return sentences


def shape_of(timeline: Timeline) -> str:
    """Ranks, stages, microbatches and batches, in words."""
    program = timeline.program
    parts = [
        _counted(program.num_ranks, "rank", "ranks"),
        _counted(program.num_stages, "stage", "stages"),
        _counted(program.num_microbatches, "microbatch", "microbatches"),
    ]
    return ", ".join(parts + ([f"{program.num_batches} batches"] if program.num_batches > 1 else []))


def _counted(count: int, noun: str, nouns: str) -> str:
    return f"{count} {noun if count == 1 else nouns}"


def memory_unit(costs: Costs) -> str:
    """What a memory curve counts: by default the costs' bytes are such that it counts stashes."""
    default = Costs()
    counts_stashes = (costs.activation_bytes, costs.weight_bytes) == (default.activation_bytes, default.weight_bytes)
    return "stashes" if counts_stashes else "bytes"
