"""`--cut`: which layers each stage of the demo's model gets."""

from pathlib import Path

import torch

from stagewright.cli.settings import TrainSettings
from stagewright.engine import RankContext
from stagewright.models import (
    GPT,
    Cut,
    GPTConfig,
    Profile,
    cut_by_counts,
    cut_by_layout,
    cut_by_parameters,
    cut_by_profile,
    cut_evenly,
    measure_profile,
    token_loss,
)
from stagewright.models.profile import LARGEST_FILE


class ProfileError(ValueError):
    """A file is no profile, or cannot be read or written."""


def settle_cut(settings: TrainSettings, config: GPTConfig, context: RankContext) -> Cut:
    """The cut that all ranks use; all of them call this alike.

    A measured one is rank 0's, for every rank would measure another one. Raises ValueError where the settings do not
    fit the model.
    """
    if settings.cut != "measured":
        return known_cut(settings, config)
    own = b""
    if context.rank == 0:
        with context.transport.baton:  # ranks that are threads must not compute meanwhile
            profile = profile_of(settings, config, context.device)
        own = ",".join(map(str, measured_cut(settings, config, profile).sizes)).encode()
    first, *_ = context.transport.gather(own)
    return Cut(tuple(map(int, first.decode().split(","))))


def check_cut(settings: TrainSettings, config: GPTConfig, *, reads_profile: bool) -> None:
    """Find out what is wrong with the cut before any rank starts. Raises ValueError."""
    if settings.cut != "measured":
        if settings.profile is not None:
            raise ValueError(f"--profile is for --cut measured: got --cut {settings.cut}; give that, or no --profile")
        known_cut(settings, config)
        return
    cut_evenly(GPT(config).parts, settings.schedule.num_stages)  # refuses more stages than layers
    if settings.profile is not None and reads_profile:
        measured_cut(settings, config, read_profile(settings.profile))


def known_cut(settings: TrainSettings, config: GPTConfig) -> Cut:
    """A cut that needs no measuring."""
    model, num_stages = GPT(config), settings.schedule.num_stages
    match settings.cut.partition("="):
        case ("parameters", _, _):
            return cut_by_parameters(model, num_stages)
        case ("layout", _, layout):
            return cut_by_layout(model.parts, layout, num_stages)
        case ("counts", _, text):
            counts = [int(number) for number in text.split(",")]
            if len(counts) != num_stages:
                raise ValueError(
                    f"every stage has its count of layers: got {len(counts)} counts for {num_stages} stages; "
                    f"give {num_stages}"
                )
            return cut_by_counts(model.parts, counts)
        case _:
            return cut_evenly(model.parts, num_stages)


def measured_cut(settings: TrainSettings, config: GPTConfig, profile: Profile) -> Cut:
    """The cut whose slowest stage is as fast as can be."""
    model, num_stages = GPT(config), settings.schedule.num_stages
    return cut_by_profile(model.parts, profile, num_stages, num_parameters=model.num_parameters())


def profile_of(settings: TrainSettings, config: GPTConfig, device: torch.device) -> Profile:
    """What is in the file that the settings name, or what is measured now, on one microbatch."""
    if settings.profile is not None:
        return read_profile(settings.profile)
    num_microbatches = settings.dp * settings.schedule.num_microbatches
    num_rows = -(-settings.batch_size // num_microbatches)
    return profile_gpt(config, num_rows, seed=settings.seed, device=device, dtype=getattr(torch, settings.dtype))


def profile_gpt(
    config: GPTConfig,
    num_rows: int,
    *,
    num_rounds: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Profile:
    """Measure a GPT on sequences of random bytes, as long as it has positions."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, config.sequence_length
    tokens, targets = (torch.randint(config.vocab_size, shape, generator=generator) for _ in range(2))
    return measure_profile(
        GPT(config), tokens, targets, token_loss, num_rounds=num_rounds, seed=seed, device=device, dtype=dtype
    )


def read_profile(path: Path) -> Profile:
    """Read a profile from a file. Raises ProfileError."""
    try:
        with path.open(encoding="utf-8") as file:
            return Profile.from_json(file.read(LARGEST_FILE + 1))  # which says if that is too much
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file. Raises ProfileError."""
    try:
        path.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot write the profile to {path}: {error.strerror or error}") from error
