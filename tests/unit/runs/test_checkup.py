"""The doctor names what is wrong and how to mend it."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vitlab.core import environment
from vitlab.runs.checkup import Finding, doctor


def finding(topic: str) -> Finding:
    return next(finding for finding in doctor().findings if finding.topic == topic)


def test_this_installation_is_sound() -> None:
    checkup = doctor()
    assert [found for found in checkup.findings if found.state == "problem"] == []
    assert checkup.healthy
    topics = {found.topic for found in checkup.findings}
    assert {*environment.CORE_PACKAGES, "extra demo", "device cpu", "data", "disk"} <= topics


def test_version_with_known_faults_is_a_problem_with_the_line_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.FLOORS, "torch", (99, 1))
    assert finding("torch").state == "problem"
    assert "pip install 'torch>=99.1'" in finding("torch").text
    assert not doctor().healthy


def test_package_that_is_missing_or_broken_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "broken_package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 1.0\n")
    (tmp_path / "broken-package.py").write_text("raise RuntimeError('no such symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("vitlab.runs.checkup.CORE_PACKAGES", ("broken-package", "absent-package"))
    assert finding("broken-package") == Finding(
        "broken-package", "problem", "1.0 is installed but cannot be imported: no such symbol"
    )
    assert finding("absent-package") == Finding(
        "absent-package", "problem", "not installed; fix with: pip install absent-package"
    )


def test_every_extra_for_users_is_looked_at() -> None:
    given = metadata.metadata("vitlab").get_all("Provides-Extra") or []
    for_who_builds_it = {"browser", "docs", "oracle", "dev"}
    assert set(environment.EXTRAS) == set(given) - for_who_builds_it
    needed = [Requirement(text) for text in metadata.requires("vitlab") or []]
    for extra, names in environment.EXTRAS.items():
        assert set(names) == {one.name for one in needed if one.marker and one.marker.evaluate({"extra": extra})}


def test_missing_extra_is_a_note_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.EXTRAS, "demo", ("absent-package",))
    assert finding("extra demo") == Finding(
        "extra demo", "note", "not installed; add it with: pip install 'vitlab[demo]'"
    )
    assert doctor().healthy, "nobody needs every extra"


def test_data_folder_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "note.txt").touch()
    monkeypatch.setenv(environment.DATA_VARIABLE, str(tmp_path))
    assert finding("data") == Finding("data", "ok", f"{tmp_path}: cifar10")
    monkeypatch.setenv(environment.DATA_VARIABLE, str(tmp_path / "absent"))
    assert finding("data").state == "problem"
    monkeypatch.delenv(environment.DATA_VARIABLE)
    assert finding("data").state == "note"
    assert str(environment.cache_folder()) in finding("data").text
