"""Several runs of one call, by `--seeds` or `--sweep`, in one folder: stopped anywhere, they go on with one `--resume`.

Beside its runs the folder has what a run has before its first step, so that it is opened, locked and compared as one, and
`runs.json`, which says what runs there will be. Which of them have begun or ended, their own folders tell.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.runs.training.run_folder import RUNS, holds_several, read_sealed, resume_command


@dataclasses.dataclass(frozen=True)
class Several:
    """What was asked for: a number of seeds, or a key and the values to try."""

    seeds: int = 1
    key: str = ""
    values: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"sweep": {self.key: list(self.values)}} if self.key else {"seeds": self.seeds}

    def __str__(self) -> str:
        return f"--sweep {self.key}={','.join(self.values)}" if self.key else f"--seeds {self.seeds}"


def read_several(folder: Path) -> Several | None:
    """What `folder` was begun with; None where it is that of a single run."""
    path = folder / RUNS
    if not holds_several(folder):
        return None
    try:
        table = json.loads(read_sealed(folder, RUNS))
        if "seeds" in table:
            return Several(int(table["seeds"]))
        ((key, values),) = table["sweep"].items()
        return Several(1, str(key), tuple(map(str, values)))
    except VitlabError as error:
        raise FileProblem(f"{path} does not say which runs there are: {error.what}", hint=error.hint) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileProblem(f"{path} does not say which runs there are: {error}") from None


def require_same(folder: Path, begun: Several | None, asked: Several) -> None:
    """An error where a resumed call asks for other runs than it was begun with. It need not ask again."""
    if asked == Several():
        return
    if begun is None:
        raise UsageError(f"{folder} is a single run; {asked} makes several new ones")
    if asked != begun:
        raise UsageError(f"{folder} was begun with {begun}, not with {asked}", hint="Leave it out, or start anew.")


def require_whole(folder: Path) -> None:
    """An error for one run of a sweep: the others decide what it is for, and a try must not see the test images."""
    place = folder.absolute()  # the parent of `.` would be `.`
    several = read_several(place.parent)
    if several is not None and several.key:
        raise UsageError(f"{folder} is one run of a sweep, which goes on as a whole", hint=resume_command(place))
