"""`vitlab evaluate`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.evaluation_options import EvaluateOptions


@verb(EvaluateOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Measure a model on labelled images: accuracy, classes, confusion, calibration, with intervals."""
    from vitlab.evaluation.result import to_json
    from vitlab.runs.evaluation.evaluation_run import evaluate

    result = evaluate(**given)
    if not show_planned(result, as_json=as_json):
        show(to_json(result), result.sentences(), as_json=as_json)
