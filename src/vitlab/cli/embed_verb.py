"""`vitlab embed`."""

from typing import Any

from vitlab.cli.options import show, show_planned, verb
from vitlab.core.errors import UsageError
from vitlab.options.evaluation_options import EmbedOptions


@verb(EmbedOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Write one vector per image, with path and label, to a file. Resumes where it was stopped."""
    if given["out"] is None and not as_json and not given["dry_run"]:
        raise UsageError("nowhere to put the vectors", hint="Give --out vectors.parquet, or --json to print them.")
    from vitlab.runs.evaluation.embedding import embed

    done = embed(**given)
    if not show_planned(done, as_json=as_json):
        show(done.to_json(), done.sentences(), as_json=as_json)
