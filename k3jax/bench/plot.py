"""The experts' benchmark as a picture."""

from collections.abc import Iterator
from pathlib import Path

from k3jax.bench.rows import Row


def draw(rows: list[Row], device: str, file: Path) -> None:
    """Left: time by tokens, with floor and peers, of the first size; right: time over floor of all.

    Raises:
        NotImplementedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotImplementedError("--plot needs matplotlib: pip install k3jax[bench]") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    lines = list(_lines(rows))
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    if lines:
        _draw_times(times, *lines[0])
    for label, line in lines:
        tokens = [row.num_tokens for row in line]
        ratios.plot(tokens, [row.ratio for row in line], marker="o", markersize=4, label=label)
    ratios.axhline(1, color="black", linewidth=0.8)
    ratios.set_ylim(bottom=0)
    ratios.set_ylabel("time over memory floor")
    ratios.legend()
    figure.suptitle(f"Routed experts of one rank, {device}")
    figure.savefig(file, dpi=120)


def _draw_times(axes, label: str, line: list[Row]) -> None:
    tokens = [row.num_tokens for row in line]
    floors = [row.floor for row in line]
    axes.plot(tokens, floors, color="black", linestyle="--", label="memory floor")
    axes.plot(tokens, [row.ours for row in line], marker="o", linewidth=2, label="k3jax")
    for name in dict.fromkeys(name for row in line for name in row.peers):
        points = [(row.num_tokens, row.peers[name]) for row in line if name in row.peers]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("microseconds a call")
    axes.set_title(label)
    axes.legend()


def _lines(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for routing, tp in dict.fromkeys((row.routing, row.tp) for row in rows):
        line = [row for row in rows if (row.routing, row.tp) == (routing, tp)]
        yield f"TP={tp}, {routing} routing", line
