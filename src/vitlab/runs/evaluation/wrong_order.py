"""What is told where a model was named that holds none: most often, model and images have changed places."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.engines.classifier import holds_weights


@contextlib.contextmanager
def hint_swapped_arguments(models: Sequence[str | Path], others: Sequence[str | Path | None]) -> Generator[None]:
    """What fails inside is a wrong call where one of `models` holds no weights; which of `others` does is told."""
    try:
        yield
    except VitlabError as error:
        if all(holds_weights(Path(model)) for model in models):
            raise
        found = [other for other in others if other is not None and holds_weights(Path(other))]
        if found:
            raise UsageError(error.what, hint=f"The model comes first, and {found[0]} holds one.") from error
        if isinstance(error, FileProblem):
            raise UsageError(error.what, hint=error.hint) from error
        raise
