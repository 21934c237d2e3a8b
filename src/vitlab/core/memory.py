"""Free memory of this machine and its devices."""

from pathlib import Path

import torch

from vitlab.core.errors import UsageError

FREE_SHARE = 0.9  # of the memory that is free: allocators round up and leave gaps
_USUAL = 16 * 2**30  # bytes of memory, where the system does not say
_GB = 2**30
_STATM = Path("/proc/self/statm")  # what this process takes, in pages; Linux alone has it


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """An error, before anything is allocated, where `what` needs more than is free."""
    free = _available(device)
    if free is not None and needed > free:
        raise UsageError(
            f"{what} needs about {needed / _GB:,.1f} GB of memory, and {max(0, free) / _GB:,.1f} GB are free on {device}",
            hint="Take a smaller model or smaller images.",
        )


def free_memory(device: torch.device) -> int:
    """Bytes that a run may use here."""
    free = _available(device)
    return _USUAL if free is None else int(FREE_SHARE * free)


def _available(device: torch.device) -> int | None:
    """Free bytes, or None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [limit for limit in (_free_in_system(), _free_in_container(), _free_in_process()) if limit is not None]
    return min(limits, default=None)


def _free_in_system() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024 * int(available.split()[1])


def _free_in_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left by the control group, beyond which the process is killed."""
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Files that were read, once or often, stay in memory until it is needed.
    reclaimable = sum(int(rows.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    return None if most == "max" else int(most) - int(used) + reclaimable


def _free_in_process() -> int | None:
    """What `ulimit -v` leaves."""
    if not _STATM.exists():
        return None
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most - _taken_by_process()


def _taken_by_process() -> int:
    import resource  # of Unix

    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes than it has now; where the system has no such limit, do nothing."""
    if not _STATM.exists():
        return
    import resource

    most = _taken_by_process() + more
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
