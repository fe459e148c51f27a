"""How the parts of a model are divided into stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from stagewright.models.checks import in_order, shown, whole_number

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

    Raises `ValueError` where there is no stage, or an empty one, and `TypeError` for what are no whole numbers.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = in_order(self.sizes, "a cut has one number of parts a stage, such as (2, 3)")
        whole = tuple(whole_number(size, f"the parts of stage {stage}") for stage, size in enumerate(sizes))
        object.__setattr__(self, "sizes", whole)
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
        stage = check_stage(stage, self.num_stages)
        bounds = (0, *accumulate(self.sizes))
        return range(bounds[stage], bounds[stage + 1])


def parts_of_transformer(num_layers: int) -> tuple[Part, ...]:
    """The parts of a decoder: embedding, layers, head."""
    layers = [Part(f"layers.{layer}") for layer in range(num_layers)]
    return Part("embedding", "embedding"), *layers, Part("head", "head")


def check_parts(parts: Sequence[Part]) -> None:
    """Raise `TypeError` for what are no parts of a model, `ValueError` where there are none."""
    for part in in_order(parts, "a model is cut between its parts, such as model.parts"):
        if not isinstance(part, Part):
            raise TypeError(f"a model is cut between its parts, such as model.parts: got {shown(part)} among them")
    if not parts:
        raise ValueError("a model has at least 1 part: got none; cut a model that computes something")


def check_whole(parts: Sequence[Part], cut: Cut) -> None:
    """Raise `TypeError` for what is no cut, and `ValueError` for that of another model, or of too many stages."""
    if not isinstance(cut, Cut):
        raise TypeError(f"a cut is what cut_evenly and its like return: got {shown(cut)}; pass one of them")
    if cut.num_parts != len(parts):
        raise ValueError(
            f"a cut divides all parts of its model: got one of {cut.num_parts} parts for a model of "
            f"{len(parts)}; make it from this model's parts"
        )
    check_enough(count_layers(parts), cut.num_stages)


def count_layers(parts: Sequence[Part]) -> int:
    """How many parts are neither embedding nor head."""
    return sum(part.kind == "layer" for part in parts)


def cut_by_counts(parts: Sequence[Part], counts: Sequence[int]) -> Cut:
    """Give each stage its number of layers; an embedding comes on top of the first stage's, a head of the last one's.

    Every stage has a layer; `cut_by_layout` gives an embedding or a head a stage of its own. Raises `ValueError` where
    the counts are not those of all layers, or would leave a stage without, and `TypeError` for other than whole
    numbers.
    """
    check_parts(parts)
    given = in_order(counts, "counts are one number of layers a stage, such as (2, 3)")
    sizes = [whole_number(count, f"the layers of stage {stage}") for stage, count in enumerate(given)]
    num_layers, told = count_layers(parts), ", ".join(map(str, sizes))
    check_enough(num_layers, len(sizes))
    if min(sizes) < 1:
        raise ValueError(
            f"every stage has at least 1 layer: got {min(sizes)} for stage {sizes.index(min(sizes))} in counts of "
            f"{told}; give it one, cut into fewer stages, or write a layout such as E|tt|tL for an embedding alone"
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"every layer is on exactly one stage: got counts of {told}, together {sum(sizes)}, for {num_layers} "
            f"layers; make them add up to {num_layers}"
        )
    sizes[0] += sum(part.kind == "embedding" for part in parts)
    sizes[-1] += sum(part.kind == "head" for part in parts)
    return Cut(tuple(sizes))


def cut_evenly(parts: Sequence[Part], num_stages: int) -> Cut:
    """Give every stage as many layers, up to one more: which ones, `layers_of_stage` says.

    Raises `ValueError` when there are fewer layers than stages, and `TypeError` for no whole number of stages.
    """
    check_parts(parts)
    num_layers = count_layers(parts)
    num_stages = check_enough(num_layers, num_stages)
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
    num_layers = whole_number(num_layers, "the number of layers")
    num_stages = check_enough(num_layers, num_stages)
    stage = check_stage(stage, num_stages)
    num_layers_each, num_extra = divmod(num_layers, num_stages)
    first_with_extra = num_stages - 1 - num_extra
    start = stage * num_layers_each + max(0, stage - first_with_extra)
    has_extra = first_with_extra <= stage < num_stages - 1
    return range(start, start + num_layers_each + has_extra)


def check_enough(num_layers: int, num_stages: int) -> int:
    """The number of stages. Raises `ValueError` where there is none, or there are fewer layers than stages."""
    num_stages = whole_number(num_stages, "the number of stages")
    if num_stages < 1:
        raise ValueError(f"a model is cut into at least 1 stage: got {num_stages}; pass 1 or more stages")
    if num_layers < num_stages:
        raise ValueError(
            f"every stage needs at least 1 layer: got {num_layers} layers for {num_stages} stages; "
            f"use {num_stages} or more layers, or fewer stages"
        )
    return num_stages


def check_stage(stage: int, num_stages: int) -> int:
    """The stage. Raises `ValueError` for one that does not exist."""
    stage = whole_number(stage, "a stage")
    if not 0 <= stage < num_stages:
        raise ValueError(
            f"stages are numbered from 0 to {num_stages - 1}: got stage {stage} of {num_stages}; "
            f"pass a stage in that range, or more stages"
        )
    return stage
