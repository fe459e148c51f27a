"""How the parts of a model are divided into stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class Part:
    """A piece of a model that no cut divides.

    `name` is where it stands in the model, such as `layers.7`: the state dict's names begin with it. An embedding may
    only come first and a head, which is followed by the loss, last; all others are layers.
    """

    name: str
    kind: Kind = "layer"


@dataclass(frozen=True)
class Cut:
    """How many parts each stage holds, the first stage the first ones.

    Raises `ValueError` where there is no stage, or an empty one.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("a model is cut into at least 1 stage: got 0; pass 1 or more stages")
        for stage, size in enumerate(self.sizes):
            if size < 1:
                raise ValueError(
                    f"every stage holds a part of the model: got {size} for stage {stage} of {len(self.sizes)}; "
                    f"give it a part, or cut into fewer stages"
                )

    @property
    def num_stages(self) -> int:
        """Stages that this makes."""
        return len(self.sizes)

    @property
    def num_parts(self) -> int:
        """Parts of the whole model."""
        return sum(self.sizes)

    def parts_of_stage(self, stage: int) -> range:
        """The indices of the parts that one stage holds. Raises `ValueError` for a stage that does not exist."""
        check_stage(stage, self.num_stages)
        bounds = (0, *accumulate(self.sizes))
        return range(bounds[stage], bounds[stage + 1])


def parts_of_transformer(num_layers: int) -> tuple[Part, ...]:
    """The parts of a decoder: embedding, layers, head."""
    layers = [Part(f"layers.{layer}") for layer in range(num_layers)]
    return Part("embedding", "embedding"), *layers, Part("head", "head")


def count_layers(parts: Sequence[Part]) -> int:
    """How many parts are neither embedding nor head."""
    return sum(part.kind == "layer" for part in parts)


def cut_by_counts(parts: Sequence[Part], counts: Sequence[int]) -> Cut:
    """Give each stage its number of layers; an embedding comes on top of the first stage's, a head of the last one's.

    Raises `ValueError` where the counts are not those of all layers, or would leave a stage empty.
    """
    num_layers = count_layers(parts)
    if min(counts, default=0) < 0 or sum(counts) != num_layers:
        raise ValueError(
            f"every layer is on exactly one stage: got counts of {', '.join(map(str, counts)) or 'no stage'}, together "
            f"{sum(counts)}, for {num_layers} layers; make them add up to {num_layers}"
        )
    sizes = list(counts)
    sizes[0] += sum(part.kind == "embedding" for part in parts)
    sizes[-1] += sum(part.kind == "head" for part in parts)
    return Cut(tuple(sizes))


def cut_evenly(parts: Sequence[Part], num_stages: int) -> Cut:
    """Give every stage as many layers, up to one more: which ones, `layers_of_stage` says.

    Raises `ValueError` when there are fewer layers than stages.
    """
    num_layers = count_layers(parts)
    check_enough(num_layers, num_stages)
    return cut_by_counts(parts, [len(layers_of_stage(num_layers, num_stages, stage)) for stage in range(num_stages)])


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """Return the global indices of the layers that one stage holds in an even cut.

    Stages hold contiguous layers, every layer is on exactly one stage, and no stage holds more than one layer more
    than another. Layers left over by the even division go to the inner stages next to the last one, then to the
    first, never to the last:

        10 layers on 4 stages    0 1 | 2 3 4 | 5 6 7 | 8 9
        11 layers on 4 stages    0 1 2 | 3 4 5 | 6 7 8 | 9 10

    The last stage already computes the head and the loss, the first the embedding; and of the inner stages the later
    ones keep fewer microbatches in flight under 1F1B, so a layer more costs least memory there.

    Raises `ValueError` when there are fewer layers than stages or the stage does not exist.
    """
    check_enough(num_layers, num_stages)
    check_stage(stage, num_stages)
    num_layers_each, num_extra = divmod(num_layers, num_stages)
    first_with_extra = num_stages - 1 - num_extra
    start = stage * num_layers_each + max(0, stage - first_with_extra)
    has_extra = first_with_extra <= stage < num_stages - 1
    return range(start, start + num_layers_each + has_extra)


def check_enough(num_layers: int, num_stages: int) -> None:
    """Raise `ValueError` where there is no stage, or there are fewer layers than stages."""
    if num_stages < 1:
        raise ValueError(f"a model is cut into at least 1 stage: got {num_stages}; pass 1 or more stages")
    if num_layers < num_stages:
        raise ValueError(
            f"every stage needs at least 1 layer: got {num_layers} layers for {num_stages} stages; "
            f"use {num_stages} or more layers, or fewer stages"
        )


def check_stage(stage: int, num_stages: int) -> None:
    """Raise `ValueError` for a stage that does not exist."""
    if not 0 <= stage < num_stages:
        raise ValueError(
            f"stages are numbered from 0 to {num_stages - 1}: got stage {stage} of {num_stages}; "
            f"pass a stage in that range, or more stages"
        )
