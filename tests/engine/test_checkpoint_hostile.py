"""Checkpoints that are foreign, damaged or forged: a ValueError that names the file; nothing is executed or changed."""

import hashlib
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Loader, Shape, make_pipeline, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import launch_on

from stagewright.engine import Checkpoints, PeerError, Pipeline, RankContext, read_state_dict
from stagewright.engine.launch.context import context_of, default_transport

SHAPE = Shape("2bw", 1, 1, model={"num_layers": 1, "hidden_size": 2}, pipeline={"loss_scale": "dynamic"})


class Victim:
    """A training that has saved, and is asked to load what has become of it.

    Args:
        folder: for what it saves.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipe = make_pipeline(context_of(default_transport()), SHAPE)
        for step in range(3):
            self.pipe.train_step(*make_tokens(step))
        self.checkpoints(folder).save()
        [self.saved] = folder.glob("step-3.save-1")

    def checkpoints(self, folder: Path) -> Checkpoints:
        assert self.pipe.optimizer is not None
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.pipe.optimizer, [2, 4])
        return Checkpoints(folder, self.pipe, parts={"loader": Loader(), "scheduler": scheduler})

    def load(self, folder: Path) -> int | None:
        return self.checkpoints(folder).load()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(tmp_path_factory.mktemp("victim"))
    with victim.pipe:
        yield victim


@pytest.fixture
def copied(victim: Victim, tmp_path: Path) -> Path:
    """A folder with a copy of its checkpoints."""
    shutil.copytree(victim.folder, tmp_path / "copy")
    return tmp_path / "copy"


class Bomb:
    """Goes off when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_forged_pickle_is_never_executed(victim: Victim, copied: Path, tmp_path: Path) -> None:
    """Under any name that a reader of DCP's or torch's own files would look for, and in the place of each of ours."""
    mark = tmp_path / "executed"
    pickled = pickle.dumps(Bomb(mark))
    saved = copied / victim.saved.name
    for name in (".metadata", "__0_0.distcp", "model.pt", "rank-7.safetensors"):
        (saved / name).write_bytes(pickled)
    assert victim.load(copied) == 3
    for path in (saved / "rank-0.safetensors", saved / "index.json", copied / "latest"):
        path.write_bytes(pickled)
        with pytest.raises(ValueError, match=f"{path.name} cannot be read"):
            victim.load(copied)
        torch.save(Bomb(mark), path)
        assert zipfile.is_zipfile(path)
        with pytest.raises(ValueError, match=f"{path.name} cannot be read"):
            victim.load(copied)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "it would have gone off"


def index_of(saved: Path) -> Any:
    return json.loads((saved / "index.json").read_bytes())["content"]


def forge(saved: Path, content: Any) -> None:
    """Write an index with a right checksum."""
    sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (saved / "index.json").write_text(json.dumps({"sha256": sha256, "content": content}))


def cut_shard(saved: Path) -> None:
    path = saved / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change_shard(saved: Path) -> None:
    path = saved / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def change_index(saved: Path) -> None:
    path = saved / "index.json"
    path.write_bytes(path.read_bytes().replace(b'"num_steps": 3', b'"num_steps": 4'))


def put_index(saved: Path, data: bytes) -> None:
    (saved / "index.json").write_bytes(data)


def put_latest(saved: Path, data: bytes) -> None:
    (saved.parent / "latest").write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard cut off": (cut_shard, r"rank-0.safetensors cannot be read: \d+ bytes were written, but it has \d+"),
    "shard changed": (change_shard, "rank-0.safetensors cannot be read: its contents have changed"),
    "shard gone": (
        lambda saved: (saved / "rank-0.safetensors").unlink(),
        "rank-0.safetensors cannot be read: it is not there",
    ),
    "index changed": (change_index, "index.json cannot be read: its contents have changed"),
    "index gone": (lambda saved: (saved / "index.json").unlink(), "index.json cannot be read: it is not there"),
    "index empty": (lambda saved: put_index(saved, b""), "index.json cannot be read: Expecting value"),
    "index foreign": (lambda saved: put_index(saved, b'{"a": 1}'), "index.json cannot be read: this is no index"),
    "index not text": (lambda saved: put_index(saved, b"\xff\xfe\x00"), "index.json cannot be read: "),
    "index deep": (lambda saved: put_index(saved, b"[" * 10**6), "index.json cannot be read: .*recursion"),
    "latest elsewhere": (lambda saved: put_latest(saved, b"../other"), "latest cannot be read: it names no checkpoint"),
    "latest absolute": (lambda saved: put_latest(saved, b"/etc"), "latest cannot be read: it names no checkpoint"),
    "latest long": (lambda saved: put_latest(saved, b"s" * 10**6), "latest cannot be read: .* more than 200 bytes"),
    "latest gone": (lambda saved: put_latest(saved, b"step-9.save-9"), "save-9/index.json cannot be read: it is not"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_by_the_name_of_the_file_and_changes_nothing(
    damage: Callable[[Path], Any], message: str, victim: Victim, copied: Path
) -> None:
    before = {name: value.clone() for name, value in victim.pipe.modules[0].state_dict().items()}
    damage(copied / victim.saved.name)
    with pytest.raises(ValueError, match=message) as refusal:
        victim.load(copied)
    assert str(copied) in str(refusal.value)
    after = victim.pipe.modules[0].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_size_is_checked_before_memory_is_taken(victim: Victim, copied: Path) -> None:
    """A header that promises four petabytes, with a right checksum."""
    saved = copied / victim.saved.name
    shape = {"dtype": "F64", "shape": [2**49], "data_offsets": [0, 2**52]}
    text = json.dumps({"model/head.norm.weight": shape}).encode()
    data = len(text).to_bytes(8, "little") + text
    (saved / "rank-0.safetensors").write_bytes(data)
    content = index_of(saved)
    content["shards"] = [{"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
    forge(saved, content)
    with pytest.raises(ValueError, match=r"rank-0.safetensors cannot be read: .*impossible shape"):
        victim.load(copied)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["../../etc/passwd", "model/head.norm.weight", "rank-0/random/torch", "AdamW", "float64"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["tensor", "tuple", "dict", "counter", "dtype", "float", "kind"]), inner, max_size=2
    ),
    max_leaves=5,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(member, dict | list):
            yield from places(member)


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.lists(JSON, min_size=1, max_size=3))
def test_a_forged_index_loads_or_is_refused(victim: Victim, chosen: random.Random, values: list[Any]) -> None:
    """Whatever stands in any place of it, under a right checksum: no other error comes out than a ValueError."""
    folder = victim.folder.parent / "forged"
    if not folder.exists():
        shutil.copytree(victim.folder, folder)
    saved = folder / victim.saved.name
    content = index_of(victim.saved)
    for value in values:
        container, key = chosen.choice(list(places(content)))
        container[key] = value
    forge(saved, content)
    try:
        victim.load(folder)
    except ValueError as error:
        assert str(folder) in str(error)  # noqa: PT017  # most are refused, but not all


@given(st.integers(0, 10**9), st.binary(max_size=6), st.sampled_from(["index.json", "rank-0.safetensors", "latest"]))
def test_bytes_that_were_changed_are_refused(victim: Victim, position: int, patch: bytes, name: str) -> None:
    folder = victim.folder.parent / "patched"
    if not folder.exists():
        shutil.copytree(victim.folder, folder)
    path = folder / name if name == "latest" else folder / victim.saved.name / name
    whole = path.read_bytes()
    position %= len(whole)
    path.write_bytes(whole[:position] + patch + whole[position + len(patch) + 1 :])
    same = path.read_bytes() == whole
    try:
        assert victim.load(folder) == 3
        assert same or name == "latest"  # one blank more, say
    except ValueError as error:
        assert not same
        assert str(folder) in str(error)  # noqa: PT017
    finally:
        path.write_bytes(whole)


def load_other(context: RankContext, folder: Path, shape: Shape, options: Any) -> None:
    with make_pipeline(context, shape) as pipe:
        Checkpoints(folder, pipe, **options).load()


def save_small(context: RankContext, folder: Path, options: Any) -> None:
    with make_pipeline(context, Shape("1f1b", 2)) as pipe:
        pipe.train_step(*make_tokens(0))
        Checkpoints(folder, pipe, **options).save()


def by_stage(stage: int, name: str) -> str:
    return f"stage{stage}.{name}"


OTHER: dict[str, tuple[Shape, Any, str]] = {
    "deeper": (Shape("1f1b", 2, model={"num_layers": 5}), {}, r"of another model.*it has no layers\.4"),
    "flatter": (Shape("1f1b", 2, model={"num_layers": 3}), {}, r"it has layers\.3\..* more, which no stage holds"),
    "wider": (Shape("1f1b", 2, model={"hidden_size": 16}), {}, r"is float64\[.*8\] there and float64\[.*16\] here"),
    "coarser": (Shape("1f1b", 2, dtype=torch.float32), {}, r"is float64\[.*8\] there and float32\[.*8\] here"),
    "SGD": (Shape("1f1b", 2, optimizer=torch.optim.SGD), {}, "a training with AdamW: this is one with SGD"),
    "parts": (Shape("1f1b", 2), {"parts": {"loader": Loader()}}, "has no part 'loader': it was saved without one"),
    "names": (Shape("1f1b", 2), {"global_name": by_stage}, r"it has no stage[01]\..*come from global_name"),
}


@pytest.mark.parametrize(("shape", "options", "message"), OTHER.values(), ids=OTHER)
def test_a_checkpoint_of_something_else_is_refused(shape: Shape, options: Any, message: str, tmp_path: Path) -> None:
    launch_on("threads", save_small, 2, (tmp_path, {}))
    with pytest.raises(ValueError, match=rf"step-1\.save-1 cannot be loaded: .*{message}"):
        launch_on("threads", load_other, 2, (tmp_path, shape, options))
    assert "head.norm.weight" in read_state_dict(tmp_path)


def load_damaged(context: RankContext, folder: Path) -> str:
    with make_pipeline(context, Shape("1f1b", 2)) as pipe:
        with pytest.raises((ValueError, PeerError)) as failure:
            Checkpoints(folder, pipe).load()
        assert pipe.train_step(*make_tokens(0)) is not None
        return f"{failure.type.__name__}: {failure.value}"


def test_all_ranks_hear_of_a_shard_that_one_of_them_needs(tmp_path: Path) -> None:
    """And none has loaded anything."""
    launch_on("threads", save_small, 2, (tmp_path, {}))
    (tmp_path / "step-1.save-1" / "rank-1.safetensors").unlink()
    first, second = launch_on("threads", load_damaged, 2, (tmp_path,))
    assert first.startswith("PeerError: rank 1 cannot load ")
    assert second.startswith("ValueError: ")
    assert all("rank-1.safetensors cannot be read: it is not there" in message for message in (first, second))


class Pairs(torch.nn.Module):
    """Two stages of one kind."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def save_ambiguous(context: RankContext, folder: Path) -> None:
    with Pipeline(Pairs, schedule="1f1b", num_microbatches=1, transport=context.transport) as pipe:
        Checkpoints(folder, pipe, global_name=without_stage).save()


def without_stage(stage: int, name: str) -> str:
    return name


def test_names_that_are_not_unique_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks 0 and 1 both have a tensor model/layer\.weight.*global_name"):
        launch_on("threads", save_ambiguous, 2, (tmp_path,))
    assert not list(tmp_path.glob("step-*"))
