"""How the layers of a model are divided into stages."""


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """Return the global indices of the layers that one stage holds.

    Stages hold contiguous layers, every layer is on exactly one stage, and no stage holds more than one layer more
    than another. Layers left over by the even division go to the inner stages next to the last one, then to the
    first, never to the last:

        10 layers on 4 stages    0 1 | 2 3 4 | 5 6 7 | 8 9
        11 layers on 4 stages    0 1 2 | 3 4 5 | 6 7 8 | 9 10

    The last stage already computes the head and the loss, the first the embedding; and of the inner stages the later
    ones keep fewer microbatches in flight under 1F1B, so a layer more costs least memory there.

    Raises `ValueError` when there are fewer layers than stages or the stage does not exist.
    """
    if num_stages < 1:
        raise ValueError(f"a model is cut into at least 1 stage: got {num_stages}; pass 1 or more stages")
    if num_layers < num_stages:
        raise ValueError(
            f"every stage needs at least 1 layer: got {num_layers} layers for {num_stages} stages; "
            f"use {num_stages} or more layers, or fewer stages"
        )
    if not 0 <= stage < num_stages:
        raise ValueError(
            f"stages are numbered from 0 to {num_stages - 1}: got stage {stage} of {num_stages}; "
            f"pass a stage in that range, or more stages"
        )
    num_layers_each, num_extra = divmod(num_layers, num_stages)
    first_with_extra = num_stages - 1 - num_extra
    start = stage * num_layers_each + max(0, stage - first_with_extra)
    has_extra = first_with_extra <= stage < num_stages - 1
    return range(start, start + num_layers_each + has_extra)
