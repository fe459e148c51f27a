"""Whatever happens between ranks, short of a failure, changes no bit of a result; a failure anywhere ends all of them.

Every collective and every message goes through the transport, and so through ``injecting``, which makes ranks sleep,
lets messages of different channels overtake each other, wakes ranks for nothing, and fails.
"""

import ast
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed import Trained
from disturbed import CASES, NUM_RANKS, train, train_disturbed
from injecting import Call, Disturber, Failure, Injected, Kind, Shuffler, Sleeper, launch_disturbed
from launching import launch_on

from stagewright.engine import PeerError, RankContext

ENGINE = Path(__file__).parent.parent.parent / "engine"


@cache
def undisturbed(name: str) -> Sequence[Trained]:
    """What the ranks make of a training, and the calls of a disturber that does nothing."""
    return launch_on("threads", train, NUM_RANKS[name], (name,))


@cache
def calls_of(name: str) -> Sequence[Sequence[Call]]:
    """What each rank calls in a training."""
    disturbers = [Disturber() for _ in range(NUM_RANKS[name])]
    results = launch_disturbed(train, disturbers, (name,))
    assert_same_bits(results, undisturbed(name))
    return [disturber.calls for disturber in disturbers]


def assert_same_bits(ours: Sequence[Trained], theirs: Sequence[Trained]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.losses, one.norms, one.evaluated) == (other.losses, other.norms, other.evaluated)
        assert one.weights.keys() == other.weights.keys()
        assert all(torch.equal(weight, other.weights[key]) for key, weight in one.weights.items())


def assert_undisturbed(name: str, seed: int) -> None:
    """Ranks sleep at random, all messages are late and out of order between channels, and waiting ranks are woken."""
    kind = Sleeper if seed % 4 == 0 else Shuffler
    disturbers = [kind((name, seed, rank)) for rank in range(NUM_RANKS[name])]
    results = launch_disturbed(train, disturbers, (name,), wakes=seed % 2 == 1)
    assert_same_bits(results, undisturbed(name))


@pytest.mark.parametrize("name", NUM_RANKS)
def test_delays_reordering_and_wake_ups_change_no_bit(name: str) -> None:
    for seed in range(3):
        assert_undisturbed(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_RANKS)
def test_no_seed_changes_a_bit(name: str) -> None:
    for seed in range(100):
        assert_undisturbed(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "zb-h1"])
def test_no_seed_changes_a_bit_on_processes(name: str) -> None:
    of_ranks = launch_on("gloo", train_disturbed, NUM_RANKS[name], (name, range(20)))
    for results in zip(*of_ranks):
        assert_same_bits([trained for trained, _ in results], undisturbed(name))
    assert sum(num_signals for results in of_ranks for _, num_signals in results) > 20


def test_processes_may_be_late_and_woken_for_nothing() -> None:
    of_ranks = launch_on("gloo", train_disturbed, NUM_RANKS["2bw"], ("2bw", range(2)))
    for results in zip(*of_ranks):
        assert_same_bits([trained for trained, _ in results], undisturbed("2bw"))
    assert sum(num_signals for results in of_ranks for _, num_signals in results) > 20


# Which calls there are


def test_every_kind_of_call_is_made() -> None:
    kinds = {call.kind for name in NUM_RANKS for calls in calls_of(name) for call in calls}
    assert kinds == set(Kind.__args__)  # type: ignore[attr-defined]
    lines = {call.line[2] for name in NUM_RANKS for calls in calls_of(name) for call in calls if call.line}
    assert lines >= {"activation", "gradient", "replica", "tied", "scalars"}


class Shuffled(Shuffler):
    """Counts how often messages of several channels lay ready."""

    num_choices = 0

    def order(self, lines: list[Any]) -> list[Any]:
        self.num_choices += len(lines) > 1
        return super().order(lines)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_messages_do_overtake_each_other(name: str) -> None:
    disturbers = [Shuffled((name, rank)) for rank in range(NUM_RANKS[name])]
    launch_disturbed(train, disturbers, (name,))
    assert min(disturber.num_choices for disturber in disturbers) > 3


OF_DISTRIBUTED = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend",
    "monitored_barrier", "P2POp", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip


def test_only_transports_communicate() -> None:
    """But for FSDP and DTensor, whose collectives are torch's own."""
    found = []
    for path in sorted(ENGINE.rglob("*.py")):
        if path.parent.name == "transport":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(ast.Name("dist"), name) if name in OF_DISTRIBUTED:
                    found.append(f"{path.name}:{node.lineno} dist.{name}")
                case ast.ImportFrom(str(module), names) if module.startswith("torch.distributed"):
                    found += [f"{path.name} {one.name}" for one in names if one.name in OF_DISTRIBUTED]
    assert found == []


# Failures


class Witness:
    """Trains, and notes with which error a rank has ended."""

    def __init__(self) -> None:
        self.ends: dict[int, BaseException] = {}

    def train(self, context: RankContext, name: str) -> None:
        try:
            train(context, name)
        except BaseException as error:
            self.ends[context.rank] = error
            raise


def assert_ends_all(name: str, rank: int, kind: Kind, index: int) -> None:
    """The launcher raises the failure itself; every other rank ends, and says who has failed if it was not done."""
    disturbers = [Failure(kind, index) if one == rank else Disturber() for one in range(NUM_RANKS[name])]
    witness = Witness()
    with pytest.raises(Injected, match=f"^{kind} {index}"):
        launch_disturbed(witness.train, disturbers, (name,))
    culprit = {f"rank {rank}"} | ({f"rank {rank // 2} of replica {rank % 2}"} if name == "replicas" else set())
    assert isinstance(witness.ends.pop(rank), Injected)
    for error in witness.ends.values():
        assert isinstance(error, PeerError)
        assert any(str(error).startswith(f"{name} failed") for name in culprit)
        assert "Injected" in str(error)


def places(name: str, rank: int) -> list[tuple[Kind, int]]:
    """The first, the middle and the last call of each kind that a rank makes in a training."""
    counts = Counter(call.kind for call in calls_of(name)[rank])
    return [(kind, index) for kind, count in counts.items() for index in sorted({0, count // 2, count - 1})]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "replicas"])
def test_a_failure_of_any_call_ends_every_rank(name: str) -> None:
    rank = NUM_RANKS[name] - 2
    for kind, index in places(name, rank):
        assert_ends_all(name, rank, kind, index)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_RANKS)
def test_a_failure_of_any_call_of_any_rank_ends_every_rank(name: str) -> None:
    for rank in range(NUM_RANKS[name]):
        for kind, index in places(name, rank):
            assert_ends_all(name, rank, kind, index)
