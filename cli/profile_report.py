"""What a person sees of a profile."""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from stagewright.cli.cutting import profile_gpt, write_profile
from stagewright.cli.profile_costs import costs_of_profile, costs_text
from stagewright.models import GPT, Cut, GPTConfig, Profile, cut_by_profile, cut_evenly, layout_of


def profile_and_print(parsed: argparse.Namespace, console: Console) -> None:
    """Do what the command was asked for. Raises ValueError where that cannot be done."""
    config = GPTConfig(
        num_layers=parsed.layers,
        hidden_size=parsed.hidden,
        num_heads=parsed.heads,
        sequence_length=parsed.sequence,
    )
    if parsed.stages is not None:
        cut_evenly(GPT(config).parts, parsed.stages)  # refuses more stages than layers, before anything is measured
    device = "cuda" if torch.cuda.is_available() else "cpu"
    profile = profile_gpt(
        config,
        parsed.micro_batch_size,
        num_rounds=parsed.rounds,
        seed=parsed.seed,
        device=device,
        dtype=getattr(torch, parsed.dtype),
    )
    if parsed.out is not None:
        write_profile(profile, parsed.out)
    console.print(profile_table(profile))
    console.print(
        f"times in ms and memory in KiB, for a microbatch of {profile.num_rows} x {parsed.sequence} bytes in "
        f"{profile.dtype} on one {profile.device}; the head's contain the loss",
        highlight=False,
        soft_wrap=True,
    )
    if parsed.stages is not None:
        print_cut(profile, cut_by_profile(GPT(config).parts, profile, parsed.stages), config, console)


def profile_table(profile: Profile) -> Table:
    """One row a part."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("part")
    for title in ("forward", "backward", "input gradient", "weight gradient", "activations", "output", "parameters"):
        table.add_column(title, justify="right")
    for part in profile.parts:
        seconds = (part.forward, part.backward, part.input_gradient, part.weight_gradient)
        sizes = (part.activation_bytes, part.output_bytes)
        table.add_row(
            part.name,
            *(f"{1000 * duration:.3f}" for duration in seconds),
            *(f"{size / 1024:.1f}" for size in sizes),
            str(part.num_parameters),
        )
    return table


def print_cut(profile: Profile, cut: Cut, config: GPTConfig, console: Console) -> None:
    """Print a cut, what each of its stages takes, and the same for other commands."""
    costs = costs_of_profile(profile, cut)
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.backward, tuple)
    seconds = [forward + backward for forward, backward in zip(costs.forward, costs.backward)]
    of_stages = "  ".join(f"{1000 * of_stage:.3f}" for of_stage in seconds)
    console.print(
        f"\ncut      layout={layout_of(GPT(config).parts, cut)}\n"
        f"stages   {of_stages}  (ms, forward and backward)\n"
        f"costs    {costs_text(costs)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
