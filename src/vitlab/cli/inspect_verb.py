"""`vitlab inspect`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.inspection_options import InspectOptions


@verb(InspectOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Look inside a model: attention, saliency maps with their checks, the paper's figures, and a viewer to hover over."""
    from vitlab.runs.inspection_run import inspect

    result = inspect(**given)
    if not show_planned(result, as_json=as_json):
        show(result.to_json(), result.sentences(), as_json=as_json)
