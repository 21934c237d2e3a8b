"""Limits that the system sets."""

import pytest

from vitlab.serving.settings import Limits

resource = pytest.importorskip("resource")


@pytest.mark.parametrize(
    ("files", "connections"), [(96, 48), (512, 384), (100_000, 1024), (resource.RLIM_INFINITY, 1024)]
)
def test_connections_leave_descriptors_for_the_rest(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert Limits().within_system().max_connections == connections
