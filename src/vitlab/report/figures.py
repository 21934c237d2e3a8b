"""Pictures as bytes: curves and matrices as SVG, galleries as PNG. Nothing here touches the disk.

Figures carry no date and no random ids, so the same run draws the same bytes.
"""

import io
import warnings
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


def curves(
    steps: Sequence[int], loss: Sequence[float], lr: Sequence[float], beside: Sequence[float] | None = None
) -> bytes:
    """Training loss, raw and smoothed, with the learning rate behind it; `beside` is the loss of a run to compare with."""
    with matplotlib.rc_context(_STYLE):
        figure = matplotlib.figure.Figure(figsize=(6.4, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(steps, loss, color=_ACCENT, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(loss), color=_ACCENT, linewidth=1.8)
        if beside:
            axes.plot(range(1, len(beside) + 1), _smooth(beside), color=_ACCENT, linewidth=1.4, linestyle=(0, (4, 2)))
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.set_ylim(bottom=0)
        behind = axes.twinx()
        behind.plot(steps, lr, color=_SECOND, linewidth=1.0, linestyle=":")
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
        # Twice the largest count, so that the darkest cell stays light enough for its number.
        axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=max(2, 2 * int(mistakes.max())))
        for row, col in np.argwhere(counts > 0):
            colour = _INK if row != col else "#9aa5b1"
            axes.text(col, row, str(counts[row, col]), ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(classes)), classes, parse_math=False)
        axes.set_yticks(range(len(classes)), classes, parse_math=False)
        axes.set_xlabel("answer")
        axes.set_ylabel("truth")
        return _svg(figure)


def position_maps(similarity_YXYX: Tensor) -> bytes:
    """A small map per patch, tiled as the patches lie in the image: how alike its position is to every other."""
    rows, cols = similarity_YXYX.shape[:2]
    gap = 1
    canvas = np.full((rows * (rows + gap) - gap, cols * (cols + gap) - gap), np.nan)
    for row in range(rows):
        for col in range(cols):
            top, left = row * (rows + gap), col * (cols + gap)
            canvas[top : top + rows, left : left + cols] = similarity_YXYX[row, col].numpy()
    with matplotlib.rc_context(_STYLE):
        figure = matplotlib.figure.Figure(figsize=(4.6, 4.0 * rows / cols + 0.6), layout="constrained")
        axes = figure.add_subplot()
        shown = axes.imshow(canvas, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_xticks(
            [(cols + gap) * col + cols / 2 - 0.5 for col in range(cols)], [str(col + 1) for col in range(cols)]
        )
        axes.set_yticks(
            [(rows + gap) * row + rows / 2 - 0.5 for row in range(rows)], [str(row + 1) for row in range(rows)]
        )
        axes.set_xlabel("patch column")
        axes.set_ylabel("patch row")
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, ax=axes, shrink=0.8, label="cosine similarity")
        return _svg(figure)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _smooth(values: Sequence[float], span: float = 0.04) -> np.ndarray[Any, Any]:
    """Mean over a centred window of about `span` of the run, so that the line does not lag behind the points."""
    half = max(0, round(span * len(values) / 2))
    padded = np.pad(np.asarray(values, dtype=float), half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def _svg(figure: matplotlib.figure.Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts draw the text, not ours
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()
