"""`vitlab embed`."""

from typing import Any

from vitlab.cli.options import show, verb
from vitlab.options.evaluation_options import EmbedOptions


@verb(EmbedOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """One vector per image, with path and label, in a file. Goes on where it was stopped; computes nothing twice."""
    from vitlab.runs.evaluation.embedding import embed

    done = embed(**given)
    show(done, done.sentences(), as_json=as_json)
