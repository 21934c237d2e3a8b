"""Named intermediates: `model(x, tape)`, then `tape["block03/+attn"]`.

Without a tape nothing is kept and nothing is slower; there are no hooks. The names are listed in `docs/reference/tape.md`.
"""

import fnmatch

from torch import Tensor


class Tape(dict[str, Tensor]):
    """Tensors by name, in forward order; `Tape("block*/+mlp")` keeps what matches."""

    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self._patterns = patterns or ("*",)

    def keep(self, name: str, value: Tensor) -> None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            self[name] = value


def keep(tape: Tape | None, name: str, value: Tensor) -> Tensor:
    """`value`, noted on the tape if there is one."""
    if tape is not None:
        tape.keep(name, value)
    return value
