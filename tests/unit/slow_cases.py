"""Cases of a parametrised test of which `make test` runs the first few, and `make slow` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(kept: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the first `kept` of them marked slow. A tuple is the arguments of one case, as in `parametrize`."""
    return [
        case if number < kept else pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
