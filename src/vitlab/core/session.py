"""The session of one command: set up once, restored at the end.

Joins what every command needs before it begins: device, threads and seed, the other processes, and a console.

with open_session(device, seed, threads, quiet=quiet) as session:
    session.console.say(f"on {session.world.device}")
"""

import contextlib
from collections.abc import Generator
from typing import NamedTuple

from vitlab.core import dist
from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.core.launch import require_main_guard
from vitlab.core.runtime import Runtime, prepare, restored_torch_globals


class Session(NamedTuple):
    """`world.device` is this process's own, where several share a machine. Only the first process prints."""

    runtime: Runtime
    world: dist.World
    console: Console


@contextlib.contextmanager
def open_session(
    device: str = "auto", seed: int = 0, threads: int | None = None, *, quiet: bool = False, verbose: bool = False
) -> Generator[Session]:
    """Set torch up, join the other processes, and undo both at the end: a library call must not change global state."""
    require_main_guard()  # before anything is written: a second run would be begun
    with restored_torch_globals():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            yield Session(runtime, world, Console(quiet=quiet or not world.is_main, verbose=verbose))


def require_single_process(world: dist.World, what: str) -> None:
    """An error where several processes were started for what only one can do."""
    if world.size > 1:
        raise UsageError(f"{what} in one process, and {world.size} were started", hint="Leave torchrun or srun out.")
