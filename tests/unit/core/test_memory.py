"""What is free: in a container, what was only read counts as free; where nothing is known, nothing is refused."""

from pathlib import Path

import pytest
import torch

from vitlab.core import memory

CPU = torch.device("cpu")


def test_files_that_a_container_has_read_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("8000\n")
    (tmp_path / "memory.current").write_text("7900\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 7000\ninactive_file 250\nslab_reclaimable 50\n")
    assert memory._free_in_container(tmp_path) == 7400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._free_in_container(tmp_path) is None


def test_nothing_is_refused_where_the_system_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_free_in_system", "_free_in_container", "_free_in_process"):
        monkeypatch.setattr(memory, name, lambda: None)
    memory.require_memory(2**60, CPU, "a model")
    assert memory.free_memory(CPU) == 16 * 2**30
