"""The curves of a run as a matplotlib figure, for notebooks and papers; report pages draw their own."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitlab.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def plot_history(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Loss and learning rate by step. Needs the extra `plot`."""
    rows = [row for row in rows if "step" in row]
    if not rows:
        raise UsageError("there are no steps to draw: a linear probe has none")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "a figure of the curves") from None
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["loss"] for row in rows], color="C0")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss", color="C0")
    axes.set_ylim(bottom=0)
    rates = axes.twinx()
    rates.plot(steps, [row["lr"] for row in rows], color="C1", linestyle=":")
    rates.set_ylabel("learning rate", color="C1")
    rates.set_ylim(bottom=0)
    return figure


def encode(figure: "Figure", suffix: str) -> bytes:
    """The figure as a file: .png, .svg or .pdf."""
    if suffix not in _FORMATS:
        raise UsageError(f"a figure is written to {', '.join(_FORMATS)}, not to '{suffix}'")
    file = io.BytesIO()
    figure.savefig(file, format=suffix.removeprefix("."), dpi=150)
    return file.getvalue()
