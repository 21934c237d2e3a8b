"""What tests of every kind share."""

import contextlib
import gc
import io
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from PIL import Image

from vitlab.core.errors import VitlabError


def _least_seconds(call: Callable[..., object], *arguments: object, tries: int = 5) -> float:
    """CPU time of this thread for one call, the least of some: what a call costs itself, on a busy machine too.

    Python's collector stands still meanwhile. In a process that holds the objects of a thousand tests, one of its full rounds
    takes a second, and it begins in whichever call happens to make one object too many. A call that refuses what it is given is
    as good as one that answers.
    """
    spent: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(tries):
            started = time.thread_time()
            with contextlib.suppress(VitlabError):
                call(*arguments)
            spent.append(time.thread_time() - started)
    finally:
        if collecting:
            gc.enable()
    return min(spent)


@pytest.fixture(scope="session")
def least_seconds() -> Callable[..., float]:
    return _least_seconds


@pytest.fixture(scope="module")
def blank_figures() -> Generator[None]:
    """Figures are put together but not rendered, which is more than half the time of a tiny run with its report.

    tests/unit/report, the demo and the docs look at real ones.
    """
    png = io.BytesIO()
    Image.new("RGB", (1, 1)).save(png, "PNG")
    blank = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>', "png": png.getvalue()}

    def savefig(_figure: object, file: io.BytesIO, *, format: str, **_: Any) -> None:
        file.write(blank[format])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", savefig)
        yield
