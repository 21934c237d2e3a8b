"""`vitlab doctor`: is this installation sound, and what can it do here?"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Literal

from vitlab.core.environment import (
    CORE_PACKAGES,
    DATA_VARIABLE,
    EXTRAS,
    FLOORS,
    cache_folder,
    data_folder,
    describe_machine,
    free_bytes,
    package_version,
    usable_cores,
    version_tuple,
)

State = Literal["ok", "note", "problem"]
_MODULES = {"pillow": "PIL", "scikit-learn": "sklearn"}
_LOW_DISK_GIB = 1.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check has found."""

    topic: str
    state: State
    text: str


@dataclasses.dataclass(frozen=True)
class Checkup:
    """What `vitlab doctor --json` prints."""

    machine: dict[str, Any]
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        return all(finding.state != "problem" for finding in self.findings)


def doctor() -> Checkup:
    """Check packages, devices, data and disk; say what is wrong and how to fix it."""
    findings = [_package(name) for name in CORE_PACKAGES]
    findings += [_extra(extra, names) for extra, names in EXTRAS.items()]
    if all(finding.state != "problem" for finding in findings if finding.topic == "torch"):
        findings += _devices()
    return Checkup(describe_machine(), [*findings, _data(), _disk(Path.cwd())])


def _package(name: str) -> Finding:
    version = package_version(name)
    if version is None:
        return Finding(name, "problem", f"not installed; fix with: pip install {name}")
    floor = FLOORS.get(name)
    if floor and version_tuple(version) < floor:
        least = ".".join(map(str, floor))
        return Finding(name, "problem", f"{version} has known faults; fix with: pip install '{name}>={least}'")
    try:
        importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # a broken binary can raise anything, and naming it is this verb's job
        return Finding(name, "problem", f"{version} is installed but cannot be imported: {error}")
    return Finding(name, "ok", version)


def _extra(extra: str, names: tuple[str, ...]) -> Finding:
    missing = [name for name in names if package_version(name) is None]
    if missing:
        return Finding(f"extra {extra}", "note", f"not installed; add it with: pip install 'vitlab[{extra}]'")
    return Finding(f"extra {extra}", "ok", ", ".join(f"{name} {package_version(name)}" for name in names))


def _devices() -> list[Finding]:
    import torch

    from vitlab.core.runtime import available_devices

    devices: list[Finding] = []
    for device in available_devices():
        text = f"{torch.get_num_threads()} threads of {usable_cores()} cores, {torch.backends.cpu.get_cpu_capability()}"
        if device == "cuda":
            text = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        devices.append(Finding(f"device {device}", "ok", text if device != "mps" else "Apple GPU"))
    return devices


def _data() -> Finding:
    folder = data_folder()
    if folder is None:
        kept = cache_folder() / "data"
        return Finding("data", "note", f"{DATA_VARIABLE} is not set; named data sets are looked for in {kept} alone")
    if not folder.is_dir():
        return Finding("data", "problem", f"{DATA_VARIABLE} points to {folder}, which is not a folder")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return Finding("data", "ok", f"{folder}: {', '.join(names)}")


def _disk(folder: Path) -> Finding:
    free = free_bytes(folder) / 2**30
    return Finding("disk", "ok" if free > _LOW_DISK_GIB else "problem", f"{free:.1f} GiB free in {folder}")
