"""Versions and places, read without importing the packages."""

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


def test_version_tuples_compare_as_numbers_not_as_text() -> None:
    assert environment.version_tuple("2.9.1") < (2, 10) <= environment.version_tuple("2.10.0")


def test_absent_package_has_no_version() -> None:
    assert environment.package_version("no-such-package-at-all") is None
    assert environment.package_version("torch") is not None


def test_machine_names_every_core_package() -> None:
    machine = environment.describe_machine()
    assert set(machine["packages"]) == set(environment.CORE_PACKAGES)
    assert all(machine["packages"].values())
    assert {"vitlab", "python", "system", "cpus", "extras"} <= machine.keys()


def test_data_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.DATA_VARIABLE, str(tmp_path))
    assert environment.data_folder() == tmp_path
    monkeypatch.setenv(environment.DATA_VARIABLE, "")
    assert environment.data_folder() is None
    monkeypatch.delenv(environment.DATA_VARIABLE)
    assert environment.data_folder() is None
