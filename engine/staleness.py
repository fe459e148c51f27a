"""Staleness: remedies for gradients of weights that are some updates old, as asynchronous schedules have them.

Each is an option, ``Pipeline(staleness=…)``, alone or in a list, and off by default. The *delay* of a gradient is the
number of updates made between the weights it was computed with and those it is applied to: 1 under 2bw but for the very
first one, and up to P-1-r on rank r under pipedream. Where there is none, as under synchronous schedules, every remedy
leaves all as it is.

Forward and backward of a microbatch use one and the same version here (weight stashing). What has been proposed to
bring those two together where they do not, PipeMare's discrepancy correction above all, has nothing left to correct;
what remains is the distance between the weights of a gradient and those that it is applied to.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from torch.optim import Optimizer

from stagewright.engine.updates.treatments import Discounting, Feeding, Moving, Predicting, Treatment
from stagewright.schedules.program import UpdateRule


class Remedy(ABC):
    """What may be done against staleness; ``Pipeline`` takes one, or several."""

    def check(self, rule: UpdateRule) -> None:  # noqa: B027  # most remedies serve every schedule
        """Refuse a schedule that the remedy cannot serve."""

    @abstractmethod
    def on_rank(self, delay: int) -> Treatment:
        """The remedy at work on a rank.

        Args:
            delay: of the rank's gradients once the pipeline is full.
        """


@dataclass(frozen=True)
class LearningRateDiscount(Remedy):
    """Divide learning rates by a power of the delay that fades away (T1 of PipeMare, Yang et al. 2021).

    Update k, counted from 0, has the rate lr / (1 + delay) ** p, p = power * (1 - min(k / num_updates, 1)). PipeMare
    divides by the delay itself; with 1 added, no delay means no discount, and a delay of one update one. That comes
    close to what a quadratic bears (Lemma 1 there): its largest stable rate falls as sin(pi / (4 delay + 2)), which is
    1, 1/2, .31, .22 for delays of 0, 1, 2, 3.

    Args:
        num_updates: over which the discount fades; under pipedream every microbatch makes one.
        power: with which it begins.

    Raises:
        ValueError: one of them makes no sense.
    """

    num_updates: int
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.num_updates < 1 or self.power < 0:
            raise ValueError(f"a discount fades over 1 update or more, and its power is 0 or more: got {self}")

    def on_rank(self, delay: int) -> Treatment:
        """Goes by the delay that each update really has."""
        return Discounting(self.num_updates, self.power)


@dataclass(frozen=True)
class WeightPrediction(Remedy):
    """Compute with the weights to which the optimizer's velocity leads (SpecTrain, Chen et al. 2018, arXiv:1809.02839;
    XPipe, Guan et al. 2019, arXiv:1911.04610).

    Forward and backward of a version run on W + strength * delay * velocity, where the delay is that of the rank once
    its pipeline is full, and the velocity that of the update which made W: -lr * momentum under SGD (SpecTrain), and
    -lr * m / (sqrt(v) + eps) with m and v corrected for their bias under Adam and AdamW (XPipe), whose decay of the
    weights is left out. Updates, evaluation and checkpoints go by W itself. That takes one copy of the weights more.

    Args:
        strength: 1 to go all the way.
    """

    strength: float = 1.0

    def on_rank(self, delay: int) -> Treatment:
        """Reads the state of the rank's optimizer."""
        return Predicting(self.strength * delay)


@dataclass(frozen=True)
class DiscrepancyCorrection(Remedy):
    """Compute with weights moved on by their mean movement (after T2 of PipeMare, Yang et al. 2021).

    The movement is a mean over past updates: d = g * d + (1 - g) * (W - W before), with g = decay ** (1 / delay).
    PipeMare keeps no versions: its backwards find newer weights than their forwards had, and run on W - delay * d,
    which comes close to those. With versions kept there is nothing of this kind to correct. Used the other way, forward
    and backward of a version run on W + delay * d, which comes close to the weights that the gradient will be applied
    to. It differs from ``WeightPrediction`` in that it looks at weights alone, and so serves any optimizer. That takes
    one copy of the weights more, one for d, and one during an update.

    Args:
        decay: how much an update still counts in the mean after as many more as there are in the delay.

    Raises:
        ValueError: it is no such share.
    """

    decay: float = exp(-2)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is at least 0 and less than 1: got {self.decay}")

    def on_rank(self, delay: int) -> Treatment:
        """Watches the rank's weights."""
        return Moving(delay, self.decay ** (1 / max(delay, 1)))


@dataclass(frozen=True)
class ErrorFeedback(Remedy):
    """Put the error of each update right in the next one (after Zmushko et al. 2026, arXiv:2606.30634).

    What the optimizer makes of a gradient that is one update late is what it should have made the update before. So
    where it changes weights by u, after v the time before, they change by u + strength * (u - v): all changes add up to
    those that come without delay, but for the last one, which is not known yet. An update without delay leaves nothing
    to put right. It looks at weights alone, and so serves any optimizer; the noise of the gradients grows with it. That
    takes one copy of the weights for v, and one more during an update.

    Args:
        strength: 1 to put all of the error right.
    """

    strength: float = 1.0

    def check(self, rule: UpdateRule) -> None:
        """An error must be known one update later."""
        if rule.max_staleness > 1:
            raise ValueError(
                f"ErrorFeedback puts delays of one update right: this schedule has delays of up to "
                f"{rule.max_staleness}; take 2bw, or another remedy"
            )

    def on_rank(self, delay: int) -> Treatment:
        """Goes by the delay that each update really has."""
        return Feeding(self.strength)


class Remedies:
    """All that is done on one rank.

    Args:
        wanted: one remedy, or several, in the order in which they get to see an update.
        rule: of the schedule.
        rank: this one.

    Raises:
        TypeError: something else is wanted.
        ValueError: a remedy cannot serve the schedule, or two exclude each other.
    """

    def __init__(self, wanted: Remedy | Sequence[Remedy], rule: UpdateRule, rank: int) -> None:
        remedies = [wanted] if isinstance(wanted, Remedy) else list(wanted)
        for remedy in remedies:
            if not isinstance(remedy, Remedy):
                raise TypeError(f"staleness takes a remedy such as ErrorFeedback(), or a list of them: got {remedy!r}")
            remedy.check(rule)
        delay = rule.num_versions[rank] - 1 if rule.max_staleness else 0
        self._treatments = [remedy.on_rank(delay) for remedy in remedies]
        extrapolating = [treatment for treatment in self._treatments if treatment.extrapolates]
        if len(extrapolating) > 1:
            raise ValueError(
                "WeightPrediction and DiscrepancyCorrection both say which weights to compute with: take one of them"
            )
        self.extrapolation = extrapolating[0] if extrapolating and delay else None

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that a remedy cannot serve."""
        for treatment in self._treatments:
            treatment.check(optimizer)

    def step(self, optimizer: Optimizer, delay: int) -> None:
        """Let the optimizer step with gradients of some delay, treated."""
        for treatment in self._treatments:
            treatment.before(optimizer, delay)
        with _Discounted(optimizer, [treatment.rate(delay) for treatment in self._treatments]):
            optimizer.step()
            for treatment in self._treatments:
                treatment.after(optimizer, delay)

    def state_dict(self, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
        """What must be kept to go on later."""
        return [(type(treatment).__name__, treatment.state_dict(optimizer)) for treatment in self._treatments]

    def load_state_dict(self, optimizer: Optimizer, states: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Go on from ``state_dict``; what came from other remedies is left out, and those that are new begin anew."""
        for treatment, (kind, state) in zip(self._treatments, states):
            if kind == type(treatment).__name__:
                treatment.load_state_dict(optimizer, state)


class _Discounted:
    """Context: the learning rates of an optimizer are multiplied by some factors."""

    def __init__(self, optimizer: Optimizer, factors: Sequence[float]) -> None:
        self._groups = optimizer.param_groups
        self._factor = 1.0
        for factor in factors:
            self._factor *= factor
        self._rates: list[Any] = []

    def __enter__(self) -> None:
        if self._factor != 1.0:
            self._rates = [group["lr"] for group in self._groups]
            for group, rate in zip(self._groups, self._rates):
                group["lr"] = rate * self._factor

    def __exit__(self, *_: object) -> None:
        for group, rate in zip(self._groups, self._rates):
            group["lr"] = rate
