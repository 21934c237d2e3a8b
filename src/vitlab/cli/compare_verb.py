"""`vitlab compare`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.evaluation_options import CompareOptions


@verb(CompareOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Compare two models on the same images: the difference, its interval, and whether chance explains it."""
    from vitlab.runs.evaluation.comparison import compare

    result = compare(**given)
    if not show_planned(result, as_json=as_json):
        show(result, result.sentences(), as_json=as_json)
