"""The drawings of an evaluation. Letters: J bins, B images, K classes, A answers."""

import numpy as np
from torch import Tensor

from vitlab.evaluation.calibration import Reliability
from vitlab.evaluation.selective import RiskCoverage
from vitlab.report.figures import ACCENT, INK, SECOND, drawing, png_of, svg

_POINTS = 400  # of a curve: as many as a screen shows
_SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1)  # on a scale of square roots, about evenly spaced


def reliability_diagram(before: Reliability, after: Reliability | None) -> bytes:
    """Accuracy over confidence, with the number of images below; on the diagonal a model knows what it knows."""
    bins = len(before.count_J)
    middle, width = (np.arange(bins) + 0.5) / bins, 1 / bins
    with drawing(4.6, 4.8) as figure:
        axes, below = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
        filled = (before.count_J > 0).numpy()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
        axes.bar(middle[filled], before.accuracy_J.numpy()[filled], width * 0.9, color=ACCENT, alpha=0.35)
        axes.plot(
            before.confidence_J[filled], before.accuracy_J[filled], "o-", color=ACCENT, markersize=4, label="as it is"
        )
        if after is not None:
            filled = (after.count_J > 0).numpy()
            axes.plot(
                after.confidence_J[filled],
                after.accuracy_J[filled],
                "s--",
                color=SECOND,
                markersize=4,
                label="with the fitted temperature",
            )
            axes.legend(frameon=False, loc="upper left")
        axes.set_ylabel("share of right answers")
        axes.set_ylim(0, 1)
        axes.set_xlim(0, 1)
        below.bar(middle, before.count_J.numpy(), width * 0.9, color=ACCENT, alpha=0.35)
        below.set_ylabel("images")
        below.set_xlabel("confidence")
        return svg(figure)


def risk_curve(risk: RiskCoverage) -> bytes:
    """Mistakes among the answers that are given, when the unsure ones are kept back."""
    total = len(risk.risk_B)
    at = np.unique(np.linspace(0, total - 1, min(_POINTS, total)).round().astype(int))
    with drawing(4.6, 3.4) as figure:
        axes = figure.add_subplot()
        axes.plot((at + 1) / total, risk.risk_B.numpy()[at], color=ACCENT, linewidth=1.8)
        axes.fill_between((at + 1) / total, risk.risk_B.numpy()[at], color=ACCENT, alpha=0.12)
        axes.set_xlabel("share of the images that are answered, the surest first")
        axes.set_ylabel("share of mistakes")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        return svg(figure)


def confusion_overview(confusion_KA: Tensor) -> bytes:
    """Hundreds of classes: a dot wherever one is taken for another, darker the larger the share of the class."""
    classes = len(confusion_KA)
    share_KK = (confusion_KA / confusion_KA.sum(dim=1, keepdim=True).clamp(min=1)).numpy()[:, :classes].copy()
    np.fill_diagonal(share_KK, 0)
    with drawing(5.2, 4.6) as figure:
        axes = figure.add_subplot()
        # The square root: one mistake in fifty should still be seen.
        shown = axes.imshow(np.sqrt(share_KK), cmap="Oranges", vmin=0, interpolation="nearest")
        bar = figure.colorbar(shown, ax=axes, shrink=0.7)
        shares = [share for share in _SHARES if share <= share_KK.max()]
        bar.set_ticks([share**0.5 for share in shares], labels=[f"{share:.0%}" for share in shares])
        axes.set_xlabel("answer, by number")
        axes.set_ylabel("truth, by number")
        return png_of(figure)


def sorted_curve(values_K: Tensor) -> bytes:
    """One value per class, from the least to the greatest, with the mean."""
    values = np.sort(values_K.numpy())
    with drawing(4.6, 3.4) as figure:
        axes = figure.add_subplot()
        axes.fill_between(np.arange(len(values)), values, step="mid", color=ACCENT, alpha=0.25)
        axes.step(np.arange(len(values)), values, where="mid", color=ACCENT, linewidth=1.4)
        axes.axhline(float(values.mean()), color=SECOND, linewidth=1, linestyle="--")
        axes.set_xlabel("classes, the worst first")
        axes.set_ylabel("share of right answers")
        axes.set_ylim(0, 1)
        axes.set_xlim(0, len(values) - 1)
        return svg(figure)
