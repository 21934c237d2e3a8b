"""Pictures as bytes: curves and matrices as SVG, galleries as PNG. Nothing here touches the disk.

Figures carry no date and no random ids, so the same run draws the same bytes.
"""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np
from PIL import Image
from torch import Tensor

_INK, _ACCENT, _SECOND = "#1f2933", "#2563eb", "#d97706"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "vitlab",
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "text.color": _INK,
    "axes.labelcolor": _INK,
}


def curves(steps: Sequence[int], loss: Sequence[float], lr: Sequence[float]) -> bytes:
    """Training loss, raw and smoothed, with the learning rate behind it."""
    with matplotlib.rc_context(_STYLE):
        figure = matplotlib.figure.Figure(figsize=(6.4, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(steps, loss, color=_ACCENT, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(loss), color=_ACCENT, linewidth=1.8, label="loss")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.set_ylim(bottom=0)
        behind = axes.twinx()
        behind.plot(steps, lr, color=_SECOND, linewidth=1.0, linestyle="--")
        behind.set_ylabel("learning rate", color=_SECOND)
        behind.spines["right"].set_visible(True)
        return _svg(figure)


def confusion(counts_KK: Tensor, classes: Sequence[str]) -> bytes:
    """Truth by answer. Colour shows mistakes only: the diagonal would drown them."""
    counts = counts_KK.numpy()
    mistakes = counts - np.diag(np.diag(counts))
    with matplotlib.rc_context(_STYLE):
        side = max(3.2, 0.36 * len(classes) + 1)
        figure = matplotlib.figure.Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=max(1, int(mistakes.max())))
        for row, col in np.argwhere(counts > 0):
            colour = _INK if row != col else "#9aa5b1"
            axes.text(col, row, str(counts[row, col]), ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(classes)), classes)
        axes.set_yticks(range(len(classes)), classes)
        axes.set_xlabel("answer")
        axes.set_ylabel("truth")
        return _svg(figure)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _smooth(values: Sequence[float], span: float = 0.04) -> list[float]:
    """Exponential average over about `span` of the run."""
    keep = 1 - 1 / max(1.0, span * len(values))
    smoothed: list[float] = []
    for value in values:
        smoothed.append(keep * smoothed[-1] + (1 - keep) * value if smoothed else value)
    return smoothed


def _svg(figure: matplotlib.figure.Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()
