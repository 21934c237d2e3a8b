"""`vitlab embed`."""

from typing import Any

from vitlab.cli.options import show, verb
from vitlab.options.evaluation_options import EmbedOptions


@verb(EmbedOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Write one vector per image, with path and label, to a file. Resumes where it was stopped."""
    from vitlab.runs.evaluation.embedding import embed

    done = embed(**given)
    show(done, done.sentences(), as_json=as_json)
