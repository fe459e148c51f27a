"""Everything that reads what others may have written, each as a function of bytes; only a ValueError may come out.

A reader also does with what it has read what its command does next: a program is proved and simulated, a recording
explained and drawn.
"""

import json
import struct
import zlib
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Final

import torch
from checkpoint_reader import checkpoint_readers
from torch import Tensor

from stagewright.cli import explain_command
from stagewright.cli.arguments import build_parser
from stagewright.cli.costs import costs_of
from stagewright.cli.profile_costs import costs_of_profile
from stagewright.cli.train_arguments import train_settings
from stagewright.engine.errors import PeerError
from stagewright.engine.launch.environment import meeting_point, started_rank
from stagewright.engine.roll_call import read_answer
from stagewright.engine.timing.trace import Record
from stagewright.engine.transport import frame as wire
from stagewright.engine.value import pack, unpack
from stagewright.engine.writing import read_layout
from stagewright.models import PartProfile, Profile, cut_by_layout, cut_by_profile
from stagewright.models.cut import parts_of_transformer
from stagewright.schedules import Costs, Program, Timeline, complete, create, simulate, verify
from stagewright.schedules.drawing import PALETTES
from stagewright.schedules.explanation import explain
from stagewright.schedules.placement import NAMES as PLACEMENTS
from stagewright.schedules.recording import Recording

CPU: Final = torch.device("cpu")
PARTS: Final = parts_of_transformer(4)


@dataclass(frozen=True)
class Reader:
    """One kind of file or message.

    Args:
        read: raises a ValueError for what it does not take.
        seeds: what it takes.
        is_json: whether that is JSON.
    """

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    is_json: bool = False

    def accepts(self, data: bytes) -> bool:
        """Whether the reader takes this; any error but a refusal goes through."""
        try:
            self.read(data)
        except ValueError:
            return False
        return True


def readers() -> Mapping[str, Reader]:
    """All of them, by name."""
    return {
        "program": Reader(read_program, program_seeds()),
        "recording": Reader(read_recording, recording_seeds(), is_json=True),
        "profile": Reader(read_profile, profile_seeds(), is_json=True),
        **{name: Reader(*parts) for name, parts in checkpoint_readers().items()},
        "frame": Reader(read_frame, [bytes(frame().numpy().data)]),
        "layout": Reader(read_described, [b'[["list","t",["again",0]],["float32"],[[2]],[true]]'], is_json=True),
        "answer": Reader(lambda data: read_answer(data.decode(), "rank 1"), [b'[{"seed": "1"}, ""]'], is_json=True),
        "record": Reader(Record.from_bytes, [Record("host", 1.5, (0.25, 0.5)).to_bytes()]),
        "environment": Reader(read_environment, environment_seeds()),
        "flags": Reader(read_flags, flag_seeds()),
        "costs": Reader(read_costs, [b"F=1:1.5,I=1.3,W=0.7,send=0.05,bandwidth=1e9"]),
        "cut": Reader(lambda data: cut_by_layout(PARTS, data.decode()), [b"Et*2|(t|)*1t,L", b"(Et|)tt|tL"]),
    }


def read_program(data: bytes) -> None:
    """As ``stagewright verify`` does it."""
    text = data.decode("utf-8-sig")
    with suppress(ValueError):
        for placement in PLACEMENTS:
            Program.from_csv(text, placement=placement)
    program = Program.from_csv(text)
    assert Program.from_csv(program.to_csv()).streams == program.streams
    completed = complete(program)
    verify(program)
    simulate(completed, Costs())


def program_seeds() -> list[bytes]:
    shapes = [("1f1b", {}), ("zbv", {}), ("dualpipe", {}), ("interleaved", {"num_chunks": 2})]
    texts = [create(name, num_ranks=2, num_microbatches=4, **options).program().to_csv() for name, options in shapes]
    return [text.encode() for text in [*texts, "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD,0STEP@1\n"]]


def read_recording(data: bytes) -> None:
    """As ``stagewright explain`` does it, in all formats."""
    recording = Recording.from_json(data.decode())
    explanation = explain(recording.typical, recording.costs)
    arguments = SimpleNamespace(palette=next(iter(PALETTES)), top=10)
    for form in ("svg", "json", "trace"):
        explain_command.drawn(form, explanation, recording.schedule, arguments)  # type: ignore[arg-type]


def recording_seeds() -> list[bytes]:
    seeds = []
    for name in ("1f1b", "dualpipe"):
        program = create(name, num_ranks=2, num_microbatches=4).program()
        starts = tuple(float(position) for position in program.table.position)
        timeline = Timeline(program, Costs(), starts, tuple(start + 1 for start in starts))
        seeds.append(Recording.of(name, Costs(send=[0.5] * program.num_stages), [timeline]).to_json().encode())
    return seeds


def read_profile(data: bytes) -> None:
    """As ``--cut measured --profile`` does it."""
    profile = Profile.from_json(data.decode())
    assert Profile.from_json(profile.to_json()) == profile
    costs_of_profile(profile, cut_by_profile(PARTS, profile, 2))


def profile_seeds() -> list[bytes]:
    parts = tuple(PartProfile(part.name, part.kind, 1.0, 2.0, 1.0, 1.0, 8, 4, 2, 8) for part in PARTS)
    return [Profile(parts, 4, "float32", "cpu").to_json().encode()]


def frame() -> Tensor:
    value = {"a": torch.ones(2), 3: (None, [torch.zeros(1, dtype=torch.bool)])}
    return wire.FrameCodec(CPU).write(pack(value, "stage 1"), 2, 5)


def read_frame(data: bytes) -> None:
    """As a transport does it; the checksums are put right, or next to nothing would get past them."""
    buffer = bytearray(data.ljust(wire.HEADER_SIZE, b"\0"))
    length = int.from_bytes(buffer[12:16], "little")
    buffer[16:20] = zlib.crc32(buffer[wire.HEADER_SIZE : wire.HEADER_SIZE + length]).to_bytes(4, "little")
    buffer[wire.HEADER_SIZE - 4 : wire.HEADER_SIZE] = zlib.crc32(buffer[: wire.HEADER_SIZE - 4]).to_bytes(4, "little")
    codec = wire.FrameCodec(CPU)
    head = torch.frombuffer(buffer, dtype=torch.uint8)
    num_bytes = codec.num_bytes(head.numpy().data, 3)
    whole = codec.enlarged(head, num_bytes, 3) if head.numel() < num_bytes < 2**20 else head
    with suppress(PeerError):
        received = codec.read(whole.numpy().data, 2, 5, 3)
        unpack(received.layout.skeleton, received.tensors)


def read_described(text: bytes) -> None:
    """A frame with this layout, and as many bytes as that wants."""
    wanted = wire.FrameCodec(CPU)._remember(read_layout(text), text).num_bytes
    num_bytes = min(wanted, wire.HEADER_SIZE + len(text) + 4096)
    head = struct.pack("<IiiIIQ", wire.MESSAGE, 2, 5, len(text), 0, num_bytes)
    read_frame((head + bytes(4) + text).ljust(num_bytes, b"\0"))


def read_environment(data: bytes) -> None:
    """Variables, one a line, as launchers set them."""
    environment = dict(line.partition("=")[::2] for line in data.decode().splitlines())
    started = started_rank(environment)
    if started is not None:
        meeting_point(started, environment)


def environment_seeds() -> list[bytes]:
    slurm = "SLURM_PROCID=1\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_JOB_ID=7\nSLURM_STEP_NODELIST=node[01-03,07],gpu2"
    torchrun = "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=::1\nMASTER_PORT=29500"
    mpirun = "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\nMASTER_ADDR=first"
    return [slurm.encode(), torchrun.encode(), mpirun.encode()]


def read_flags(data: bytes) -> None:
    """Flags of ``stagewright train``, one a line, but for the one that imports a module."""
    flags = [flag for flag in data.decode().splitlines() if not flag.startswith("--schedule-m")]
    try:
        with redirect_stderr(StringIO()):
            arguments = build_parser().parse_args(["train", *flags])
    except SystemExit as error:
        raise ValueError("the parser has refused them") from error
    train_settings(arguments)


def flag_seeds() -> list[bytes]:
    given = [
        "--schedule\nzbv\n--ranks\n2\n--microbatches\n4\n--cut\nlayout=Et*2|ttL\n--seed=3",
        "--schedule\npipedream\n--schedule-option\nreplicas=2,1\n--ranks=3\n--micro-batch-size\n2\n"
        "--global-batch-size\n8",
        "--lr=1e-3\n--clip\n1\n--recompute\nfull\n--dtype\nfloat16\n--resume\nauto\n--temperature\n0.5",
    ]
    return [flags.encode() for flags in given]


def read_costs(data: bytes) -> None:
    """What ``--costs`` takes."""
    try:
        costs_of(data.decode())
    except ArgumentTypeError as error:
        raise ValueError("refused") from error


def json_places(value: object) -> list[tuple[object, object]]:
    """Every (container, key) within a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places: list[tuple[object, object]] = []
    for key, member in pairs:
        places += [(value, key), *json_places(member)]
    return places


def parsed(data: bytes) -> object:
    """A JSON value; None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None
