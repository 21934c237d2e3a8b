"""Versions, folders and limits of this machine and installation.

Reads versions without importing the packages, so that the answer is quick and a broken package can still be named.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitlab.core import reading
from vitlab.core.errors import FileProblem, UsageError

DATA_VARIABLE = "VITLAB_DATA"
CACHE_VARIABLE = "VITLAB_CACHE"
OFFLINE_VARIABLE = "VITLAB_OFFLINE"
PIXELS_VARIABLE = "VITLAB_MAX_PIXELS"

# Below these, parsers that we feed with other people's files have known memory-safety faults.
FLOORS = {"torch": (2, 10), "pillow": (12, 3)}
CORE_PACKAGES = ("torch", "numpy", "pillow", "safetensors", "typer", "rich", "jinja2")
# What only some users need, as `pip install 'vitlab[NAME]'`.
_SERVE = ("starlette", "uvicorn", "httptools", "python-multipart")
EXTRAS = {
    "datasets": ("pyarrow",),
    "demo": ("scikit-learn", *_SERVE),
    "serve": _SERVE,
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
    "ray": ("ray",),
    "fast": ("simplejpeg",),
    "hdf5": ("h5py",),
    "heic": ("pillow-heif",),
    "parquet": ("pyarrow",),
    "plot": ("matplotlib",),
    "remote": ("fsspec",),
    "s3": ("fsspec", "s3fs"),
    "gs": ("fsspec", "gcsfs"),
    "az": ("fsspec", "adlfs"),
    "http": ("fsspec", "aiohttp", "requests"),
    "tensorboard": ("tensorboard",),
    "tiff": ("tifffile",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
}
_SHOWN = 12  # digits of a hash; two that differ do so in these


@functools.cache  # reading a package's metadata takes milliseconds, and each run wants twenty of them
def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers: `2.13.0+cpu` -> (2, 13, 0)."""
    leading = re.match(r"[\d.]*", version)
    return tuple(map(int, re.findall(r"\d+", leading[0] if leading else "")))


@functools.cache
def processor_name() -> str:
    """Such as `AMD EPYC 9R14`; the kind of processor where the system does not say which."""
    with contextlib.suppress(OSError, FileProblem):
        if found := re.search(r"model name\s*: (.*)", reading.read_text("/proc/cpuinfo")):
            return found[1].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Facts that a result depends on; the caller adds threads and device."""
    return {
        "vitlab": package_version("vitlab"),
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "packages": {name: package_version(name) for name in CORE_PACKAGES},
        "extras": {extra: {name: package_version(name) for name in names} for extra, names in EXTRAS.items()},
    }


@functools.cache  # a process runs what it has loaded, also where a file is changed later
def code_fingerprint() -> str:
    """Hash of vitlab's source files, which a version number does not pin down."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:_SHOWN]


def data_folder() -> Path | None:
    """Where local data sets and weights are looked for, if the variable is set."""
    value = os.environ.get(DATA_VARIABLE)
    return Path(value) if value else None


def pixel_limit() -> int:
    """The most pixels an image may have: the variable, else 40 million."""
    text = os.environ.get(PIXELS_VARIABLE) or str(_PIXELS)
    if not (text.isascii() and text.isdigit() and 0 < int(text[:_DIGITS]) <= _MOST_PIXELS and len(text) <= _DIGITS):
        raise UsageError(f"{PIXELS_VARIABLE} is a number of pixels from 1 to {_MOST_PIXELS:,}, not '{text}'")
    return int(text)


_PIXELS = 40_000_000
_MOST_PIXELS = 178_956_970  # beyond, Pillow refuses an image itself
_DIGITS = len(str(_MOST_PIXELS))


def cache_folder() -> Path:
    """Where downloads are kept: the variable, else the system's cache folder."""
    if value := os.environ.get(CACHE_VARIABLE):
        return Path(value)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitlab"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / usual) / "vitlab"


def is_offline() -> bool:
    """Whether VITLAB_OFFLINE forbids downloads of weights."""
    return os.environ.get(OFFLINE_VARIABLE, "").lower() not in ("", "0", "false", "no")


def usable_cores() -> int:
    """Those this process may use: a job of a cluster is bound to some, and a container may have a quota of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _cpu_quotas():
        # Not there in a group without a quota; `max` or -1 where there is none.
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError, FileProblem):
            quota, period = (int(number) for file in files for number in reading.read_text(file).split())
            cores = min(cores, -(-quota // period)) if quota > 0 else cores
    return cores


_CGROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cpu_quotas() -> Iterator[tuple[Path, ...]]:
    """Where the quotas of this process may stand, as microseconds of all cores and of the period: of its group and all above.

    Linux has two versions of control groups. A container often sees its own group as the uppermost one.
    """
    lines = [":cpu:/", "::/"]  # the uppermost ones, also where the own groups are hidden
    with contextlib.suppress(OSError, FileProblem):
        lines += reading.read_text(_OWN_GROUPS).splitlines()
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:  # version 2
            top, names = _CGROUPS, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            top, names = _CGROUPS / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield tuple(folder / name for name in names)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
