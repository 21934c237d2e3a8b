"""Figures as bytes: curves and matrices as SVG, photos as PNG and JPEG.

They carry no date and no random ids, so the same run draws the same bytes.
"""

import contextlib
import io
import warnings
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, ACCENT, SECOND = "#1f2933", "#2563eb", "#d97706"
_UNROTATED_LETTERS = 6  # letters of a class name that fit beside the next one
_MOST_TICKS = 8  # of an axis, so that their numbers do not touch
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "vitlab",
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
}


@contextlib.contextmanager
def drawing(width: float, height: float) -> 'Generator["Figure"]':
    """An empty figure in our style, in inches. matplotlib is imported only here."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def curves(
    steps: Sequence[int],
    loss: Sequence[float],
    lr: Sequence[float],
    compared: Sequence[float] | None = None,
    val_loss: Sequence[tuple[int, float]] = (),
) -> bytes:
    """Training loss, raw and smoothed, with the learning rate behind it.

    `compared` is the loss of another run; `val_loss` has step and loss of every evaluation.
    """
    from matplotlib.ticker import MaxNLocator

    with drawing(6.4, 3.0) as figure:
        axes = figure.add_subplot()
        axes.plot(steps, loss, color=ACCENT, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(loss), color=ACCENT, linewidth=1.8)
        if compared:
            axes.plot(
                range(1, len(compared) + 1), _smooth(compared), color=ACCENT, linewidth=1.4, linestyle=(0, (4, 2))
            )
        if val_loss:
            axes.plot(*zip(*val_loss, strict=True), color=INK, linewidth=1.0, marker="o", markersize=3)
        axes.set_xlabel("step")
        axes.set_ylabel("loss" if val_loss else "training loss")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        lr_axes = axes.twinx()
        lr_axes.plot(steps, lr, color=SECOND, linewidth=1.0, linestyle=":")
        lr_axes.set_ylabel("learning rate", color=SECOND)
        lr_axes.spines["right"].set_visible(True)
        return svg(figure)


def confusion(counts_KK: Tensor, classes: Sequence[str]) -> bytes:
    """Truth by answer. Colour shows mistakes only: the diagonal would drown them."""
    counts = counts_KK.numpy()
    mistakes = counts - np.diag(np.diag(counts))
    side = max(3.2, 0.36 * len(classes) + 1)
    with drawing(side, side) as figure:
        axes = figure.add_subplot()
        # Twice the largest count, so that the darkest cell stays light enough for its number.
        axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=max(2, 2 * int(mistakes.max())))
        for row, col in np.argwhere(counts > 0):
            colour = INK if row != col else "#5c6975"  # paler than a mistake, and dark enough to be read
            axes.text(col, row, str(counts[row, col]), ha="center", va="center", fontsize=8, color=colour)
        rotation = 90 if max(map(len, classes)) > _UNROTATED_LETTERS else 0
        axes.set_xticks(range(len(classes)), classes, parse_math=False, rotation=rotation)
        axes.set_yticks(range(len(classes)), classes, parse_math=False)
        axes.set_xlabel("answer")
        axes.set_ylabel("truth")
        return svg(figure)


def position_maps(similarity_YXYX: Tensor) -> bytes:
    """A map per patch: how alike its position is to every other."""
    rows, cols = similarity_YXYX.shape[:2]
    gap = 1
    canvas = np.full((rows * (rows + gap) - gap, cols * (cols + gap) - gap), np.nan)
    for row in range(rows):
        for col in range(cols):
            top, left = row * (rows + gap), col * (cols + gap)
            canvas[top : top + rows, left : left + cols] = similarity_YXYX[row, col].numpy()
    with drawing(4.6, 4.0 * rows / cols + 0.6) as figure:
        axes = figure.add_subplot()
        shown = axes.imshow(canvas, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        for set_ticks, count in ((axes.set_xticks, cols), (axes.set_yticks, rows)):
            named = range(0, count, -(-count // _MOST_TICKS))
            set_ticks([(count + gap) * i + count / 2 - 0.5 for i in named], [str(i + 1) for i in named])
        axes.set_xlabel("patch column")
        axes.set_ylabel("patch row")
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, ax=axes, shrink=0.8, label="cosine similarity")
        return svg(figure)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _smooth(values: Sequence[float], span: float = 0.04) -> np.ndarray[Any, Any]:
    """Mean over a centred window of `span` of the run."""
    half = max(0, round(span * len(values) / 2))
    padded = np.pad(np.asarray(values, dtype=float), half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def svg(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts draw the text, not ours
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()


def png_of(figure: "Figure") -> bytes:
    """For drawings of so many cells that lines and text would be larger."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})  # twice a usual screen's
    return buffer.getvalue()


def jpeg(picture: Image.Image, side: int) -> bytes:
    """A photo no larger than `side`; small ones are enlarged in whole pixels."""
    if (zoom := side // max(picture.size)) > 1:
        picture = picture.resize((zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST)
    picture = picture.convert("RGB")
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()
