"""The end of a dry run: where work would start, `end_dry_run` leaves the function with what would have happened.

Raised, so that a verb needs one line at the place where its checks are done, however deep; `options.takes` makes it the result.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a call would do: the result of one with `dry_run`, in place of its usual one."""

    would: Mapping[str, str]

    def to_json(self) -> dict[str, str]:
        return dict(self.would)

    def sentences(self) -> list[str]:
        width = max(map(len, self.would))
        return [f"{name:<{width}}  {text}" for name, text in self.would.items()]


class DryRunEnded(Exception):
    """All checks of a dry run have passed."""

    def __init__(self, planned: Planned) -> None:
        super().__init__("a dry run ends here")
        self.planned = planned


def end_dry_run(dry_run: bool, would: Mapping[str, object]) -> None:
    """In a dry run, end it with these rows; those that are None are left out."""
    if dry_run:
        raise DryRunEnded(Planned({name: str(text) for name, text in would.items() if text is not None}))


def counted(images: int, classes: int | None = None) -> str:
    """`1,797 images of 10 classes`."""
    return f"{images:,} images" if classes is None else f"{images:,} images of {classes:,} classes"
