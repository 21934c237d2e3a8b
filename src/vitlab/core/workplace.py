"""Where the work of one verb is done: set up once, and left as it was found.

Joins what every verb needs before it begins: device, threads and seed, the other processes, and a voice.

with workplace(device, seed, threads, quiet=quiet) as place:
    place.console.say(f"on {place.world.device}")
"""

import contextlib
from collections.abc import Generator
from typing import NamedTuple

from vitlab.core import dist
from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.core.runtime import Runtime, prepare, unchanged


class Workplace(NamedTuple):
    """`world.device` is this process's own, where several share a machine. Only the first process has a voice."""

    runtime: Runtime
    world: dist.World
    console: Console


@contextlib.contextmanager
def workplace(
    device: str = "auto", seed: int = 0, threads: int | None = None, *, quiet: bool = False
) -> Generator[Workplace]:
    """Sets torch up, joins the other processes, and undoes both at the end: a library call must not leave marks."""
    with unchanged():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            yield Workplace(runtime, world, Console(quiet=quiet or not world.leads))


def require_alone(world: dist.World, what: str) -> None:
    """An error where several processes were started for what only one can do."""
    if world.size > 1:
        raise UsageError(f"{what} in one process, and {world.size} were started", hint="Leave torchrun or srun out.")
