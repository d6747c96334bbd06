"""What one measurement gave, and medians over repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Figures:
    """One peer under one load, once. `values` by name, the unit at its end (`cpu_us_per_event`, `ttft_p50_ms`)."""

    peer: str
    load: str
    repetition: int
    values: dict[str, float] = field(default_factory=dict)
    wrong: int = 0
    """Answers that were not what the engine said, or did not come."""
    why: str = ""
    """Of the first wrong one; or why there are no values."""


class Results:
    """All figures of a run."""

    def __init__(self, figures: Iterable[Figures] = ()) -> None:
        self.figures: list[Figures] = list(figures)

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(f.load for f in self.figures))

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(f.peer for f in self.figures))

    def of(self, peer: str, load: str) -> list[Figures]:
        return [f for f in self.figures if f.peer == peer and f.load == load]

    def names(self, load: str) -> list[str]:
        """The values that some peer has under a load."""
        return list(dict.fromkeys(name for f in self.figures if f.load == load for name in f.values))

    def value(self, peer: str, load: str, name: str) -> float | None:
        """The median over the repetitions; None where it was not measured."""
        found = [f.values[name] for f in self.of(peer, load) if name in f.values]
        return median(found) if found else None

    def wrong(self) -> list[Figures]:
        return [f for f in self.figures if f.wrong or f.why]

    def add_differences(self, against: str) -> None:
        """Add what each peer's times to the first token are above those of `against` in the same repetition."""
        base = {(f.load, f.repetition): f.values for f in self.figures if f.peer == against}
        for f in self.figures:
            direct = base.get((f.load, f.repetition))
            if direct is None or f.peer == against:
                continue
            for quantile in ("p50", "p99"):
                name = f"ttft_{quantile}_ms"
                if name in f.values and name in direct:
                    f.values[f"added_{name}"] = f.values[name] - direct[name]

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """By load, peer and name of the value."""
        return {
            load: {
                peer: {name: value for name in self.names(load) if (value := self.value(peer, load, name)) is not None}
                for peer in self.peers
                if self.of(peer, load)
            }
            for load in self.loads
        }

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: every figure of every repetition."""
        return [asdict(f) for f in self.figures]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share of `q` does not exceed. `values` is not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def histogram_quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """As Prometheus computes it: linear within the bucket. `buckets`: upper edge and cumulative count, ascending."""
    total = buckets[-1][1] if buckets else 0
    if not total:
        return None
    below, edge = 0.0, 0.0
    for upper, count in buckets:
        if count >= q * total:
            if upper == float("inf"):
                return edge
            return edge + (upper - edge) * (q * total - below) / (count - below)
        below, edge = count, upper
    return edge
