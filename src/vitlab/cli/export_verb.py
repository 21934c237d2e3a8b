"""`vitlab export`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.exporting_options import ExportOptions


@verb(ExportOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Write a model for other runtimes, with labels and preprocessing, once its answers are the same there."""
    from vitlab.exporting.export_run import export

    done = export(**given)
    if not show_planned(done, as_json=as_json):
        show(done.to_json(), done.sentences(), as_json=as_json)
