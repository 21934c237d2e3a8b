"""The curves of a run as a figure for notebooks and papers."""

import sys

import pytest

from vitlab.core.errors import MissingExtra, UsageError
from vitlab.report.history import encode, plot_history

ROWS = [{"step": step, "loss": 1 / step, "lr": 0.1 * step} for step in (1, 2, 3)]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_figure_is_encoded_as_its_suffix_says(suffix: str, start: bytes) -> None:
    assert encode(plot_history(ROWS), suffix).startswith(start)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"vitlab\[plot\]"):
        plot_history(ROWS)


def test_another_suffix_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not to '\.txt'"):
        encode(plot_history(ROWS), ".txt")


def test_what_has_no_steps_has_no_curve() -> None:
    with pytest.raises(UsageError, match="linear probe"):
        plot_history([{"l2": 0.1, "top1": 0.5}])
