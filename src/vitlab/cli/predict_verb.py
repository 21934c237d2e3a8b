"""`vitlab predict`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.evaluation_options import PredictOptions


@verb(PredictOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Label images. Files that cannot be read are reported and skipped."""
    from vitlab.runs.evaluation.prediction import predict

    found = predict(**given)
    if not show_planned(found, as_json=as_json):
        show(found.to_json(), found.sentences() if found.out is None else [found.stored()], as_json=as_json)
