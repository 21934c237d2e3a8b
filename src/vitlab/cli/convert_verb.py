"""`vitlab convert`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.weights_options import ConvertOptions


@verb(ConvertOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Convert weights from one format to another, lossless, with an account of every array."""
    from vitlab.engines.conversion import convert

    report = convert(**given)
    if not show_planned(report, as_json=as_json):
        show(report, report.sentences(), as_json=as_json)
