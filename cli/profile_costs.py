"""What the stages of a cut cost, from what the parts of the model cost."""

from collections.abc import Callable

from stagewright.models import Cut, PartProfile, Profile
from stagewright.schedules import Costs


def costs_of_profile(profile: Profile, cut: Cut) -> Costs:
    """The costs of every stage, for `simulate` and `compare`: seconds, and bytes.

    What a forward keeps counts as given back by the weight gradient, since a profile does not say how much of it the
    input gradient frees already. Raises ValueError for a cut of another model.
    """
    if cut.num_parts != len(profile.parts):
        raise ValueError(
            f"a cut divides the parts of the profile: got one of {cut.num_parts} parts for a profile of "
            f"{len(profile.parts)}; cut the model that was profiled"
        )
    stages = [profile.parts[parts.start : parts.stop] for parts in map(cut.parts_of_stage, range(cut.num_stages))]
    return Costs(
        forward=sums(stages, lambda part: part.forward),
        backward=sums(stages, lambda part: part.backward),
        input_gradient=sums(stages, lambda part: part.input_gradient),
        weight_gradient=sums(stages, lambda part: part.weight_gradient),
        message_bytes=tuple(float(parts[-1].output_bytes) for parts in stages),
        weight_bytes=sums(stages, lambda part: part.activation_bytes),
    )


def sums(stages: list[tuple[PartProfile, ...]], figure: Callable[[PartProfile], float]) -> tuple[float, ...]:
    """A figure of the parts, summed for each stage."""
    return tuple(float(sum(map(figure, parts))) for parts in stages)


def costs_text(costs: Costs) -> str:
    """The durations as `--costs` takes them, in milliseconds."""
    kinds = {"F": costs.forward, "B": costs.backward, "I": costs.input_gradient, "W": costs.weight_gradient}
    return ",".join(f"{kind}={per_stage(seconds)}" for kind, seconds in kinds.items())


def per_stage(seconds: object) -> str:
    """A number of milliseconds a stage, with colons between them."""
    assert isinstance(seconds, tuple)
    return ":".join(f"{1000 * of_stage:.4g}" for of_stage in seconds)
