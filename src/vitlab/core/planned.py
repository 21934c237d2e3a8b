"""The end of a dry run: where work would start, `stop_if_dry_run` leaves the function with what would have happened.

Raised, so that a verb needs one line at the place where its checks are done, however deep; `options.takes` makes it the result.
"""

import dataclasses
from collections.abc import Mapping

_WIDTH = 9  # of the names, so that those of most verbs stand in one column


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a call would do: the result of one with `dry_run`, in place of its usual one."""

    would: Mapping[str, str | list[str]]  # a list where there are several, such as notes

    def to_json(self) -> dict[str, str | list[str]]:
        return dict(self.would)

    def sentences(self) -> list[str]:
        width = max(_WIDTH, *map(len, self.would))
        rows = ((name, [value] if isinstance(value, str) else value) for name, value in self.would.items())
        return [f"{'' if i else name:<{width}}  {text}" for name, texts in rows for i, text in enumerate(texts)]


class DryRunEnded(Exception):
    """All checks of a dry run have passed."""

    def __init__(self, planned: Planned) -> None:
        super().__init__("a dry run ends here")
        self.planned = planned


def stop_if_dry_run(dry_run: bool, would: Mapping[str, object]) -> None:
    """In a dry run, end it with these rows; those that are None are left out."""
    if dry_run:
        rows = ((name, value) for name, value in would.items() if value is not None)
        raise DryRunEnded(Planned({name: value if isinstance(value, list) else str(value) for name, value in rows}))


def counted(images: int, classes: int | None = None) -> str:
    """`1,797 images of 10 classes`."""
    return f"{images:,} images" if classes is None else f"{images:,} images of {classes:,} classes"
