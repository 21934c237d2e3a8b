"""How this process was started: alone, by `torchrun`, or by Slurm's `srun`.

torchrun's come first, because it may itself run under Slurm. Imports nothing heavy.
"""

import dataclasses
import multiprocessing
import os
import re
from collections.abc import Mapping

from vitlab.core.errors import UsageError

# Where Slurm's processes rendezvous, when no MASTER_PORT is given. Two jobs on one machine get different ones: the number
# of the job is added. The range is one that systems do not hand out by themselves.
_FIRST_PORT, _PORTS = 20_000, 10_000


@dataclasses.dataclass(frozen=True)
class Launch:
    """`rank` of `size` processes; `address` is their rendezvous, as torch writes it."""

    rank: int
    size: int
    local_rank: int
    address: str


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """What the variables say; one process alone where they say nothing."""
    if "WORLD_SIZE" in env or "RANK" in env:
        size, rank = _number(env, "WORLD_SIZE", 1), _number(env, "RANK", 0)
        return Launch(rank, size, _number(env, "LOCAL_RANK", 0), "env://")
    if _started_by_srun(env):
        size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
        rank, local_rank = _number(env, "SLURM_PROCID", 0), _number(env, "SLURM_LOCALID", 0)
        hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1")))
        port = _number(env, "MASTER_PORT", _FIRST_PORT + _number(env, "SLURM_JOB_ID", 0) % _PORTS)
        return Launch(rank, size, local_rank, f"tcp://{env.get('MASTER_ADDR', first_host(hosts))}:{port}")
    return Launch(0, 1, 0, "")


def first_host(nodelist: str) -> str:
    """The first of Slurm's compressed list of names: `gpu[07-09,12],login` -> gpu07."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if found is None:
        raise UsageError(f"SLURM_NODELIST names no machine: {nodelist!r}")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", found[0])


def may_restart(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher restarts a failed run (torchrun, a requeued Slurm job).

    The number of restarts so far is not known: torchrun counts on each machine only what failed there.
    """
    return _number(env, "TORCHELASTIC_MAX_RESTARTS", 0) > 0 or _number(env, "SLURM_RESTART_COUNT", 0) > 0


class NoMainGuard(UsageError):
    """A script that starts its work again in every process that loads images for it."""

    def __init__(self) -> None:
        super().__init__(
            "the script runs again in every process that loads images, because this system spawns processes and does not fork",
            hint='Put its calls of vitlab under `if __name__ == "__main__":`.',
        )


def require_main_guard() -> None:
    """An error in a process that is only being started, and has come here by running the script of its parent."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what Python's own check looks at
        raise NoMainGuard


def spawns_processes() -> bool:
    """Whether a new process imports the script again (spawn, forkserver) instead of being a copy of this one (fork)."""
    return multiprocessing.get_start_method() != "fork"


def _started_by_srun(env: Mapping[str, str]) -> bool:
    """Whether this process is a step of `srun`, not the batch script of the job."""
    return "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env)


def _number(env: Mapping[str, str], name: str, otherwise: int) -> int:
    text = env.get(name, str(otherwise))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"the variable {name} must be a whole number, not {text!r}")
    return int(text)
