"""Rows of the experts' benchmark, and how they are printed."""

from collections.abc import Sequence
from dataclasses import dataclass

from k3jax.bench.timing import regime


class WrongOutputError(Exception):
    """An output is not that of the XLA implementation, so there is no row."""


@dataclass(frozen=True)
class Row:
    """One line of a table; times in microseconds a call.

    Attributes:
        routing: how experts were drawn.
        tp: ranks that share the experts.
        num_tokens: T.
        distinct: mean number of experts that a call touches.
        tier: implementation.
        floor: least time that reading these experts takes.
        ours: of the implementation that the plan takes.
        error: largest relative L2 error of an output of ours.
        peers: of what else was timed, by name.
    """

    routing: str
    tp: int
    num_tokens: int
    distinct: float
    tier: str
    floor: float
    ours: float
    error: float
    peers: dict[str, float]

    @property
    def ratio(self) -> float:
        """Time over floor."""
        return self.ours / self.floor


def table(rows: list[Row], rest: float | None) -> str:
    """All rows, under a heading for each routing and tensor-parallel size."""
    lines = []
    for routing, tp in dict.fromkeys((row.routing, row.tp) for row in rows):
        part = [row for row in rows if (row.routing, row.tp) == (routing, tp)]
        names = list(dict.fromkeys(name for row in part for name in row.peers))
        lines += ["", title(routing, tp, rest), heading(names), *(line(row, names) for row in part)]
    return "\n".join(lines)


def title(routing: str, tp: int, rest: float | None) -> str:
    """Of one routing and tensor-parallel size, timed with these rests if they are known."""
    how = "" if rest is None else f", {regime(rest)}"
    return f"one rank of TP={tp}, {routing} routing, microseconds{how}"


def heading(peers: Sequence[str]) -> str:
    """Names of the columns."""
    names = "".join(f"  {name:>10}" for name in peers)
    return f"tokens  experts    floor     ours  ratio{names}  tier"


def line(row: Row, peers: Sequence[str]) -> str:
    """One row."""
    times = "".join(
        f"  {row.peers[name]:10.1f}" if name in row.peers else " " * 11 + "-" for name in peers
    )
    return (
        f"{row.num_tokens:6d}  {row.distinct:7.1f}  {row.floor:7.1f}  {row.ours:7.1f}  "
        f"{row.ratio:5.2f}{times}  {row.tier}"
    )
