"""Versions and places, read without importing the packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.core import environment


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("12.3", (12, 3)),
        ("2.10.0rc1", (2, 10, 0)),
        ("1.0.post2", (1, 0)),
        ("2.9.1", (2, 9, 1)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_version_tuple_holds_the_leading_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert environment.version_tuple(version) == numbers


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are bound to cores on Linux")
def test_cores_are_those_that_the_process_is_bound_to() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from vitlab.core import environment; print(environment.usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("50000 100000", 1),
        ("150000 100000", 2),
        ("400000 100000", 4),
        ("1600000 100000", 8),
        ("max 100000", 8),
        ("", 8),
        ("50000 0", 8),
    ],
)
@pytest.mark.parametrize("place", ["", "system.slice/job.scope", "system.slice"])
@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_no_more_than_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int, version: int, place: str
) -> None:
    """The quota stands at a group above the process's own, or at its own, which a container sees as the uppermost."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(environment, "_CGROUPS", tmp_path)
    monkeypatch.setattr(environment, "_OWN_GROUPS", own := tmp_path / "own")
    controllers = "" if version == 2 else "cpu,cpuacct"
    own.write_text(f"5:memory:/other\n0:{controllers}:/system.slice/job.scope\n")
    assert environment.usable_cores() == 8
    group = tmp_path / ("cpu" if version == 1 else "") / place
    group.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (group / "cpu.max").write_text(quota)
    else:
        for name, text in zip(("quota", "period"), quota.replace("max", "-1").split(), strict=False):
            (group / f"cpu.cfs_{name}_us").write_text(f"{text}\n")
    assert environment.usable_cores() == cores
    if not place:  # as a container sees it, also where /proc is hidden
        own.unlink()
        assert environment.usable_cores() == cores


def test_version_tuples_compare_as_numbers_not_as_text() -> None:
    assert environment.version_tuple("2.9.1") < (2, 10) <= environment.version_tuple("2.10.0")


def test_absent_package_has_no_version() -> None:
    assert environment.package_version("no-such-package-at-all") is None
    assert environment.package_version("torch") is not None


def test_machine_names_every_core_package() -> None:
    machine = environment.describe_machine()
    assert set(machine["packages"]) == set(environment.CORE_PACKAGES)
    assert all(machine["packages"].values())
    assert {"vitlab", "python", "system", "processor", "cpus", "extras"} <= machine.keys()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_processor_is_named_as_the_system_names_it() -> None:
    """Times of two machines with one kind of processor, x86_64 say, are not those of one machine."""
    assert environment.processor_name() in Path("/proc/cpuinfo").read_text()


def test_fingerprint_of_the_code_is_that_of_every_source_file(tmp_path: Path) -> None:
    """A copy has the same one until any file of it is changed."""
    copy = shutil.copytree(Path(environment.__file__).parents[1], tmp_path / "vitlab")
    ask = [sys.executable, "-c", "from vitlab.core.environment import code_fingerprint as f; print(f())"]

    def reported() -> str:
        return subprocess.run(
            ask, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
        ).stdout

    assert reported().strip() == environment.code_fingerprint()
    with (copy / "training" / "loop.py").open("a") as file:
        file.write("\n")
    assert reported().strip() not in ("", environment.code_fingerprint())


def test_data_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.DATA_VARIABLE, str(tmp_path))
    assert environment.data_folder() == tmp_path
    monkeypatch.setenv(environment.DATA_VARIABLE, "")
    assert environment.data_folder() is None
    monkeypatch.delenv(environment.DATA_VARIABLE)
    assert environment.data_folder() is None
