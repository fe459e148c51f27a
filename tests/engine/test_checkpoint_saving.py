"""Saving: at once or in the background, so many as are kept, and what becomes of one that is interrupted."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest
import torch
from checkpointing import Shape, make_pipeline, make_tokens
from launching import launch_on

from stagewright.engine import Checkpoints, Pipeline, RankContext, read_state_dict
from stagewright.engine.checkpoint.files import Files, Part, Written

SHAPE = Shape("1f1b", 2)


class SlowFiles(Files):
    """A disk that writes no shard before it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.begun = threading.Event()

    def write(self, path: Path, parts: Iterable[Part]) -> Written:
        if path.suffix == ".safetensors":
            self.begun.set()
            assert self.allowed.wait(60)
        return super().write(path, parts)


def weights_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: value.clone() for module in pipe.modules.values() for name, value in module.state_dict().items()}


def train_while_saving(context: RankContext, folder: Path, files: SlowFiles) -> dict[str, torch.Tensor]:
    """The weights at the time of the save; steps follow before anything of it is written."""
    with make_pipeline(context, SHAPE) as pipe:
        pipe.train_step(*make_tokens(0))
        weights = weights_of(pipe)
        with Checkpoints(folder, pipe, asynchronous=True, files=files) as checkpoints:
            checkpoints.save()
            assert files.begun.wait(60)
            pipe.train_step(*make_tokens(1))
            assert not (folder / "latest").exists()
            context.transport.gather(b"")
            files.allowed.set()
            checkpoints.save()  # waits for the first one
            assert (folder / "latest").exists()
        return weights


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is written is what was there when it was asked for."""
    first, second = launch_on("threads", train_while_saving, 2, (tmp_path, SlowFiles()))
    saved = read_state_dict(tmp_path / "step-1.save-1")
    assert saved.keys() == (first | second).keys()
    assert all(torch.equal(saved[name], value) for name, value in (first | second).items())
    assert (tmp_path / "latest").read_text() == "step-2.save-2\n"
    assert not list(tmp_path.glob(".*"))


def fail_while_saving(context: RankContext, folder: Path) -> None:
    with make_pipeline(context, SHAPE) as pipe:
        pipe.train_step(*make_tokens(0))
        Checkpoints(folder, pipe).save()
        files = SlowFiles()
        if context.rank == 0:
            files.allowed.set()  # it waits for what rank 1 will never write
        with Checkpoints(folder, pipe, asynchronous=True, files=files) as checkpoints:
            checkpoints.save()
            assert files.begun.wait(60)
            context.transport.gather(b"")
            files.allowed.set()
            if context.rank == 1:
                raise RuntimeError("the loader has no more data")
            pipe.train_step(*make_tokens(1))


def test_a_training_that_fails_leaves_its_save_half_done_and_no_thread(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the loader has no more data"):
        launch_on("threads", fail_while_saving, 2, (tmp_path,))
    assert not [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]
    assert (tmp_path / "latest").read_text() in ("step-1.save-1\n", "step-1.save-2\n")
    assert len(read_state_dict(tmp_path)) > 10


def save_often(context: RankContext, folder: Path, keep: int | None) -> list[str]:
    """The checkpoints that are there after each save; the training begins anew from the first one in the end."""
    seen = []
    with make_pipeline(context, SHAPE) as pipe:
        checkpoints = Checkpoints(folder, pipe, keep=keep)
        for step in range(3):
            pipe.train_step(*make_tokens(step))
            checkpoints.save(100 * pipe.num_steps)
            seen.append(" ".join(sorted(path.name for path in folder.glob("step*"))))
        assert checkpoints.load() == 300
        assert pipe.num_steps == 3
        assert checkpoints.load(sorted(folder.glob("step*"))[0]) == int(seen[-1].split(".")[0].split("-")[1])
        pipe.train_step(*make_tokens(7))
        checkpoints.save(7)
        seen.append((folder / "latest").read_text().strip())
        seen.append(" ".join(sorted(path.name for path in folder.glob("step*"))))
    return seen


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (
            2,
            [
                "step-100.save-1",
                "step-100.save-1 step-200.save-2",
                "step-200.save-2 step-300.save-3",
                "step-7.save-4",
                "step-300.save-3 step-7.save-4",
            ],
        ),
        (
            None,
            [
                "step-100.save-1",
                "step-100.save-1 step-200.save-2",
                "step-100.save-1 step-200.save-2 step-300.save-3",
                "step-7.save-4",
                "step-100.save-1 step-200.save-2 step-300.save-3 step-7.save-4",
            ],
        ),
    ],
    ids=["two", "all"],
)
def test_the_last_saves_are_kept_whatever_their_steps(keep: int | None, expected: list[str], tmp_path: Path) -> None:
    """A training that went back to an earlier checkpoint saves fewer steps than there were."""
    first, second = launch_on("threads", save_often, 2, (tmp_path, keep))
    assert first == second == expected


class Counted(Files):
    """Notes the order of what happens to the disk."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def write(self, path: Path, parts: Iterable[Part]) -> Written:
        self.done.append(f"write {path.name}")
        return super().write(path, parts)

    def sync(self, file: IO[bytes]) -> None:
        self.done.append(f"sync {Path(file.name).name}")
        super().sync(file)

    def sync_folder(self, folder: Path) -> None:
        self.done.append(f"sync {folder.name}/")
        super().sync_folder(folder)

    def rename(self, source: Path, destination: Path) -> None:
        self.done.append(f"rename {source.name} to {destination.name}")
        super().rename(source, destination)


def save_counted(context: RankContext, folder: Path, done: list[str]) -> None:
    with make_pipeline(context, Shape("1f1b", 1)) as pipe:
        Checkpoints(folder, pipe, files=Counted(done)).save(5)


def test_a_checkpoint_takes_its_place_once_it_is_on_the_disk_and_latest_moves_last(tmp_path: Path) -> None:
    done: list[str] = []
    launch_on("threads", save_counted, 1, (tmp_path / "run", done))
    assert done == [
        "write rank-0.safetensors",
        "sync rank-0.safetensors",
        "write index.json",
        "sync index.json",
        "sync .step-5.save-1.partial/",
        "rename .step-5.save-1.partial to step-5.save-1",
        "sync run/",
        "write .latest.new",
        "sync .latest.new",
        "rename .latest.new to latest",
        "sync run/",
    ]


def save_wrongly(context: RankContext, folder: Path, keep: int, step: int) -> None:
    with make_pipeline(context, SHAPE) as pipe:
        Checkpoints(folder, pipe, keep=keep).save(step + context.rank)


@pytest.mark.parametrize(
    ("keep", "step", "message"),
    [
        (0, 0, "at least one checkpoint is kept: got keep=0"),
        (1, -2, "steps are counted from 0: got step -[12]"),
        (1, 3, r"all ranks save the same step: got \[3, 4\]"),
    ],
)
def test_what_cannot_be_meant_is_refused(keep: int, step: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        launch_on("threads", save_wrongly, 2, (tmp_path, keep, step))
    assert not (tmp_path / "latest").exists()
