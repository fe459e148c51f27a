"""`stagewright verify`: is a program from a file right, and if so, how good is it."""

import argparse
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Final

from stagewright.schedules import Program, ScheduleError, UpdateRule, simulate, verify
from stagewright.schedules.placement import NAMES as PLACEMENTS
from stagewright.schedules.proof import SEMANTICS
from stagewright.schedules.proof.completion import complete

# Far above any real program: 32 MiB are some five million instructions.
MAX_BYTES: Final = 32 * 2**20
MAX_RANKS: Final = 4096

EXIT_ILLEGAL: Final = 1
EXIT_WRONG_INPUT: Final = 2

# What breaks where the flags do not say by which rule a program updates its weights.
RULES_OF_UPDATES: Final = ("gradient missing", "gradient buffer", "version overwritten", "staleness")

EXAMPLES: Final = """\
examples:
  stagewright verify schedule.csv
  stagewright verify schedule.csv --placement v --semantics buffered
  stagewright show zbv --ranks 4 --microbatches 8 --format csv | stagewright verify -
  stagewright show 2bw --ranks 4 --microbatches 8 -o 2bw.csv                        which says what comes next:
  stagewright verify 2bw.csv --microbatches 8 --versions 2 --staleness 1
  stagewright verify pipedream.csv --microbatches 8 --update-every 2 --versions 3 --staleness 2 --gradient-buffers 2

A file has one line a rank and one cell an instruction, as torch.distributed.pipelining writes it (compute_only or
compute_comms): 2F5 is the forward of microbatch 5 on stage 2, 2B5 its backward, 2I5 and 2W5 its halves, 2SEND_F5,
2RECV_F5, 2SEND_B5, 2RECV_B5, (2F5;3B1)OVERLAP_F_B, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD; empty cells are idle. Ours are
2F5@1 (on weight version 1) and 2STEP@1. Sends, receives and updates that the file leaves out are added first.

The exit code is 0 where the program is legal, 1 where it is not, 2 where there is nothing to prove.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `verify` command."""
    parser = subparsers.add_parser(
        "verify",
        help="prove that a program in a CSV file is right, or say what is wrong",
        description="Prove that a program in a CSV file is legal: nothing missing, nothing too early, no deadlock.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a program; - reads it from standard input")
    parser.add_argument(
        "--semantics",
        type=lambda name: name.replace("-", "_"),
        choices=SEMANTICS,
        default="rendezvous",
        help="sends that never wait, that wait for their receive (default), or streams as on NCCL",
    )
    shape = parser.add_argument_group("shape", "read off the file where left out")
    shape.add_argument("--placement", choices=PLACEMENTS, help="which rank owns which stage")
    shape.add_argument("--chunks", type=count, metavar="V", help="stages that each rank owns")
    shape.add_argument("--microbatches", type=count, metavar="M", help="microbatches of one batch")
    updates = parser.add_argument_group(
        "updates",
        "by default one a batch, on weights that are never old; `stagewright show SCHEDULE -o FILE.csv` says what an "
        "asynchronous one needs",
    )
    updates.add_argument(
        "--update-every",
        type=count,
        metavar="U",
        help="microbatches of one update (default M); of pipedream 1, with replicas one round over them",
    )
    updates.add_argument("--versions", type=count, default=1, metavar="K", help="weight versions kept (default 1)")
    updates.add_argument(
        "--staleness", type=whole, default=0, metavar="D", help="updates a gradient may lag (default 0)"
    )
    updates.add_argument(
        "--gradient-buffers",
        type=count,
        default=1,
        metavar="G",
        help="gradient sums kept a stage (default 1); 2 where STEPs wait for other ranks, as with replicas",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prove the program in a file: 0 with a summary, 1 with the reason, 2 where it cannot be read."""
    name = "standard input" if arguments.file == "-" else arguments.file
    try:
        text = read(arguments.file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"stagewright verify: {error}\n")
        return EXIT_WRONG_INPUT
    try:
        program = program_of(text, arguments)
        verify(program, arguments.semantics)
        sys.stdout.write(summary(program, name, arguments.semantics))
    except ScheduleError as error:
        sys.stderr.write(f"{name}: {error}\n")
        if error.rule in RULES_OF_UPDATES:
            sys.stderr.write(
                "where the file holds several batches, say --microbatches: those of one batch; --update-every, where "
                "an update takes fewer; --versions and --staleness, where weights are not the newest ones; and "
                "--gradient-buffers 2, where backwards go on before an update: what `stagewright show SCHEDULE -o "
                "FILE.csv` says of a program of ours\n"
            )
        return EXIT_ILLEGAL
    return 0


def read(file: str) -> str:
    """The text of a file, of a size that a program can have.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or too large.
    """
    if file == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file} has more than {MAX_BYTES} bytes: too large for a program")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: there is nothing to prove")
    if (num_lines := text.count("\n")) > MAX_RANKS:
        raise ValueError(f"{file} has {num_lines} lines: too many for a program, at most {MAX_RANKS} ranks")
    return text


def program_of(text: str, arguments: argparse.Namespace) -> Program:
    """The program in a text, on the placement and under the update rule that the flags say.

    Raises:
        ScheduleError: the text is no program, or not one of that shape.
    """
    program = Program.from_csv(text, num_microbatches=arguments.microbatches, placement=arguments.placement)
    if arguments.chunks is not None and program.placement.num_chunks != arguments.chunks:
        raise ScheduleError(
            f"a rank owns {program.placement.num_chunks} stage(s) here, not --chunks {arguments.chunks}"
        )
    rule = UpdateRule(
        arguments.update_every or program.num_microbatches,
        (arguments.versions,) * program.num_ranks,
        arguments.staleness,
        arguments.gradient_buffers,
    )
    return replace(program, update_rule=rule)


def flags_for(program: Program) -> list[str]:
    """What to tell `verify` of a program beside its file, so that it is proved under its own update rule."""
    rule, num_microbatches = program.updates, program.num_microbatches
    flags = (  # each with its value and its default
        ("--microbatches", num_microbatches, num_microbatches if program.num_batches == 1 else None),
        ("--update-every", rule.microbatches_per_update, num_microbatches),
        ("--versions", max(rule.num_versions), 1),
        ("--staleness", rule.max_staleness, 0),
        ("--gradient-buffers", rule.num_gradient_buffers, 1),
    )
    return [text for flag, number, default in flags if number != default for text in (flag, str(number))]


def summary(program: Program, file: str, semantics: str) -> str:
    """One paragraph: the program's shape, and how long it takes at the default costs."""
    completed = complete(program)
    timeline = simulate(completed)
    batches = "" if program.num_batches == 1 else f" in each of {program.num_batches} batches"
    num_added = _length(completed) - _length(program)
    added = f" ({num_added} of them sends, receives and updates that the file leaves out)" if num_added else ""
    text = (
        f"{file} is legal under {semantics.replace('_', '-')} sends: {program.num_ranks} ranks, {program.num_stages} "
        f"stages, {program.num_microbatches} microbatches{batches}, {_length(completed)} instructions{added}. "
        f"With F = I = W = 1 and B = 2 its makespan is {timeline.makespan:g}, where {timeline.ideal:g} is ideal: a "
        f"bubble fraction of {timeline.bubble_fraction:.4f} (idle / (P x makespan)), a bubble overhead of "
        f"{timeline.bubble_overhead:.4f} ((makespan - ideal) / ideal). A rank stashes at most "
        f"{max(timeline.peak_stash)} microbatches of one stage."
    )
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    return textwrap.fill(text, width=width, break_on_hyphens=False, break_long_words=False) + "\n"


def _length(program: Program) -> int:
    return sum(map(len, program.streams))


def count(text: str) -> int:
    """Read a whole number from 1 up."""
    if (number := whole(text)) >= 1:
        return number
    raise argparse.ArgumentTypeError(f"a whole number from 1 up is needed: got {text!r}")


def whole(text: str) -> int:
    """Read a whole number from 0 up, of up to nine digits."""
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number is needed: got {text!r}")
