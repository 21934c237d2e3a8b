"""`vitlab serve`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.options.serving_options import ServeOptions


@verb(ServeOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Answer over HTTP, with a page to try the model on, until Ctrl-C."""
    from vitlab.serving.serve_run import serve

    served = serve(**given)
    if not show_planned(served, as_json=as_json):
        show(served, served.sentences(), as_json=as_json)
