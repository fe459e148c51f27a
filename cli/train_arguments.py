"""The flags of `stagewright train`, and the settings that they make."""

import argparse
from dataclasses import MISSING, fields
from pathlib import Path

from stagewright.cli.launcher import launcher_name, num_started_ranks
from stagewright.cli.settings import DTYPES, OPTIMIZERS, TrainSettings
from stagewright.cli.values import count, cut_choice, positive, prompt, recompute, resumed_folder, temperature
from stagewright.schedules import ScheduleError, add_arguments, from_arguments

# Where no launcher has started any.
NUM_LOCAL_RANKS = 2

TRAIN_EXAMPLES = """\
examples:
  stagewright train                                        1F1B on 2 local processes, the standard library's sources
  stagewright train --schedule gpipe --ranks 4 --microbatches 8 --steps 200
  stagewright train --schedule 2bw --ranks 2               without flushes, on weights that are one update old
  stagewright train --schedule interleaved --chunks 2 --recompute full --dtype bfloat16 --clip 1 --tie
  stagewright train --data ~/notes --layers 6 --hidden 192 --lr 1e-3 --optimizer muon
  stagewright train --global-batch-size 32 --micro-batch-size 4        the Megatron way to say --microbatches 8
  stagewright train --dp 2                                 2 replicas of the pipeline, each on half of every batch
  stagewright train --ranks 4 --cut measured               layers where they make the slowest stage fastest
  stagewright train --quiet --metrics run.jsonl            the table alone, and one JSON object a step
  stagewright train --save run --save-every 50 --resume    what a crash interrupts goes on with the same command
  stagewright train --save run --save-on-sigterm --resume  and so does what SIGTERM has ended, after its step
  stagewright train --sample "def " "class "               at the end, what the model writes after these prompts

  torchrun --nproc-per-node 2 -m stagewright.cli train     the ranks that torchrun starts, here 2 on this machine
  srun --nodes 2 --ntasks-per-node 1 stagewright train     those that SLURM starts, here 1 on each of 2 machines
  mpirun -np 2 stagewright train                           those that MPI starts, here 2 on this machine

  torchrun --nproc-per-node 2 --max-restarts 3 -m stagewright.cli train --save run --save-every 50 --resume
                                                           goes on by itself when ranks die
  on two machines, the same command on both, FIRST being the name of one:
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 --max-restarts 3 \\
      -m stagewright.cli train --save run --save-every 50 --resume --timeout 60

Every batch has --batch-size sequences, cut into --microbatches; the model is cut into as many stages as the schedule
has. The same seed gives the same losses for every synchronous schedule, number of ranks and number of microbatches
(with --dropout, the microbatches must be the same too). 2bw and pipedream compute on older weights and have curves of
their own. With --dp D there are D replicas of the pipeline, on ranks x D processes; each takes its share of every
batch, and cuts that into --microbatches: the losses are those of one replica with the same --batch-size (and with
--dropout, with D times the microbatches). The rank that has the loss reports. At the end, bits per byte on files that
were held out.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `train` command."""
    parser = subparsers.add_parser(
        "train",
        help="train a small byte-level GPT over a pipeline",
        description="Train a small byte-level GPT on real text over a pipeline of processes.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, num_ranks=NUM_LOCAL_RANKS)
    parser.add_argument(
        "--dp",
        type=count,
        metavar="D",
        help="replicas of the pipeline, each of --ranks processes, that train together on a share of every batch each "
        "(default %(default)s)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file or a folder of text (default: the Python standard library's own sources)",
    )
    text.add_argument("--sequence", type=count, metavar="N", help="bytes of one sequence (default %(default)s)")
    text.add_argument(
        "--batch-size", type=count, metavar="N", help=f"sequences of one batch (default {TrainSettings.batch_size})"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=count, metavar="N", help="transformer layers (default %(default)s)")
    model.add_argument("--hidden", type=count, metavar="N", help="width of the activations (default %(default)s)")
    model.add_argument("--heads", type=count, metavar="N", help="attention heads (default %(default)s)")
    model.add_argument("--dropout", type=float, metavar="P", help="share that is dropped (default %(default)s)")
    model.add_argument("--tie", action="store_true", help="one weight for embedding and head, whatever their ranks")
    model.add_argument(
        "--cut",
        type=cut_choice,
        metavar="CUT",
        help="how the layers are divided into stages: even; parameters or measured: the greatest stage as small as can "
        "be, by number of parameters or by time, embedding and head too; counts=1,3,2: layers of each stage; "
        "layout=Et|ttt|ttL: as in Megatron (default %(default)s)",
    )
    model.add_argument(
        "--profile", type=Path, metavar="FILE", help="for --cut measured: what `stagewright profile --out` has measured"
    )
    _add_learning(parser)
    _add_saving(parser)
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="end with an error that names the rank for which the others have waited for so long (default: half an "
        "hour); more than it takes to write a checkpoint",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write one JSON object a step to this file, with --resume behind its end",
    )
    output.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write curves for TensorBoard to this folder (extra: tensorboard)",
    )
    output.add_argument(
        "--trace", type=Path, metavar="FILE", help="record the last steps in this file, for `stagewright explain`"
    )
    output.add_argument(
        "--sample", type=prompt, nargs="+", metavar="TEXT", help="let the trained model continue these texts"
    )
    output.add_argument("--sample-bytes", type=count, metavar="N", help="how far, in bytes (default %(default)s)")
    output.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="1 samples as the model predicts, 0 takes the likeliest byte (default %(default)s)",
    )
    output.add_argument("--quiet", action="store_true", help="print the closing table alone, and the samples")
    # None is "not given": a launcher can stand in for --ranks, and --global-batch-size for --batch-size.
    defaults = {field.name: field.default for field in fields(TrainSettings) if field.default is not MISSING}
    parser.set_defaults(**defaults | {"batch_size": None, "ranks": None})


def _add_saving(parser: argparse.ArgumentParser) -> None:
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="save the training to this folder at the end, and with --save-every before",
    )
    saving.add_argument("--save-every", type=count, metavar="N", help="save after every N updates too")
    saving.add_argument("--keep", type=count, metavar="N", help="keep the last N checkpoints (default: all)")
    saving.add_argument("--save-async", action="store_true", help="write checkpoints while the training goes on")
    saving.add_argument(
        "--save-on-sigterm",
        action="store_true",
        help="when SIGTERM comes, as before a machine is taken away, finish the step, save and end with exit code 0",
    )
    saving.add_argument(
        "--resume",
        type=resumed_folder,
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on from the newest checkpoint in this folder, or from this very one; without DIR, or with auto, from "
        "the folder of --save, or from the beginning while nothing is there. Schedule, ranks, chunks, --dp and --cut "
        "may be others",
    )


def _add_learning(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("learning")
    learning.add_argument("--steps", type=count, metavar="N", help="updates (default %(default)s)")
    learning.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="muon: for the matrices of the layers, adamw for the rest; sgd: with momentum 0.9 (default %(default)s)",
    )
    learning.add_argument("--lr", type=positive, metavar="X", help="highest learning rate (default %(default)s)")
    learning.add_argument(
        "--clip", type=positive, metavar="NORM", help="clip the gradients of all stages together to this norm"
    )
    learning.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="batches of one update, their losses averaged (default 1)",
    )
    learning.add_argument(
        "--on-nan",
        choices=("raise", "skip"),
        help="when a loss is NaN or infinite: raise: end with an error that names step and microbatch; skip: make no "
        "update of that batch, on any rank (default: nobody looks)",
    )
    learning.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and activations (default %(default)s). With bfloat16 and float16 the optimizer trains fp32 "
        "copies, and gradients are added up in fp32; float16 also scales the loss, by a factor that halves on all "
        "ranks when a gradient overflows on any, which skips the update",
    )
    learning.add_argument(
        "--recompute",
        type=recompute,
        metavar="off|full|K",
        help="full: keep only the input of every forward, and run it again when its gradient is due; "
        "K: all but the last K microbatches of a batch (default %(default)s)",
    )
    learning.add_argument("--seed", type=int, metavar="N", help="of weights, text order, dropout (default %(default)s)")


def train_settings(arguments: argparse.Namespace) -> TrainSettings:
    """Turn the parsed flags of `train` into settings.

    Raises ValueError where they select no schedule, or contradict each other or what has started the ranks.
    """
    _check_started(arguments)
    given = {arguments.batch_size, arguments.global_batch_size} - {None}
    if len(given) > 1:
        raise ScheduleError(
            f"--batch-size {arguments.batch_size} contradicts --global-batch-size {arguments.global_batch_size}; "
            f"give one of them"
        )
    arguments.batch_size = given.pop() if given else TrainSettings.batch_size
    if arguments.micro_batch_size is not None:
        arguments.global_batch_size = _rows_of_replica(arguments)
    arguments.schedule = from_arguments(arguments)
    arguments.sample = tuple(arguments.sample)
    return TrainSettings(**{field.name: getattr(arguments, field.name) for field in fields(TrainSettings)})


def _rows_of_replica(arguments: argparse.Namespace) -> int:
    """A replica's share of the batch, which microbatches of a given size are to make up."""
    batch_size, dp, size = arguments.batch_size, arguments.dp, arguments.micro_batch_size
    if dp > 1 and batch_size % (dp * size):
        raise ScheduleError(f"--batch-size {batch_size} is not a multiple of --dp {dp} x --micro-batch-size {size}")
    rows: int = batch_size // dp
    return rows


def _check_started(arguments: argparse.Namespace) -> None:
    """Deal the ranks that a launcher has started to the replicas, unless --ranks says so already."""
    num_started = num_started_ranks()
    if arguments.ranks is None:
        arguments.ranks = NUM_LOCAL_RANKS if num_started is None else max(num_started // arguments.dp, 1)
    if num_started not in (None, arguments.ranks * arguments.dp):
        replicas = "" if arguments.dp == 1 else f" and --dp {arguments.dp}"
        remedy = "leave it out" if num_started % arguments.dp == 0 else "give a --dp that divides them"
        raise ScheduleError(
            f"{launcher_name()} has started {num_started} ranks: got --ranks {arguments.ranks}{replicas}; {remedy}"
        )
