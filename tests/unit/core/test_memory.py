"""What is free: in a container, what was only read counts as free; where nothing is known, nothing is refused."""

import platform
import subprocess
import sys
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such options")
def test_kept_memory_is_reused_without_asking_the_system() -> None:
    """In a process of its own: it cannot be undone. 40 MB are more than glibc ever keeps by itself."""
    program = """
import resource, torch
from vitlab.core.memory import keep_freed_memory
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.zeros(10_000_000).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = pages()
keep_freed_memory()
pages()
print(usual, pages())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < usual / 10, "the pages of 160 MB, and almost none"
