"""What tests of every kind share."""

import contextlib
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vitlab.core.errors import VitlabError

HERE = Path(__file__).parent

os.environ.setdefault(
    "VITLAB_OFFLINE", "1"
)  # also of the processes that tests start: none may ask the world for weights

# Tests write tens of thousands of small files, wait for each to be on the disk, and delete them. Where memory is offered as a
# folder, all that costs nothing; `make soak` stays on the disk. It has to have room, and to allow programs, which tests write.
MEMORY = Path("/dev/shm")
ROOM_BYTES = 6 * 2**30  # six times what the files of the unit part take together


def _has_room(folder: Path) -> bool:
    if not folder.is_dir() or os.statvfs(folder).f_flag & os.ST_NOEXEC or not os.access(folder, os.W_OK):
        return False
    return min(shutil.disk_usage(folder).free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >= ROOM_BYTES


if os.environ.get("VITLAB_SOAK") != "1" and _has_room(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Begun first, so that no process is left with one of them at the end, while the others have nothing to do.
LONG = (
    *("docs/test_docs.py", "system/test_server.py", "system/test_first_sessions.py", "browser/test_pages.py"),
    *("system/test_reliability_training.py", "system/test_server_load.py", "system/test_killed_run.py"),
    *("browser/test_serve_page.py", "system/test_installed_wheel.py", "system/test_reliability_checkpoints.py"),
    *("system/test_many_processes.py", "browser/test_viewer.py", "system/test_launchers.py", "docs/test_site.py"),
    *("system/test_evaluate_among_several.py", "system/test_whole_demo.py", "system/test_batch_among_several.py"),
    *("system/test_killed_several.py", "docs/test_notebooks.py", "system/test_studies.py", "browser/test_plot.py"),
    *("system/test_killed_noisy_student.py", "system/test_killed_demo.py", "system/test_two_at_once.py"),
    *("unit/exporting/test_export.py", "unit/runs/test_inspection_run.py", "unit/runs/test_noisy_student.py"),
    *("unit/cli/test_train_verb.py", "unit/exporting/test_families.py", "unit/runs/test_probing.py"),
    *("unit/runs/test_pretext_runs.py", "contract/test_public.py", "unit/runs/test_multirun.py"),
    *("contract/test_interface.py", "unit/training/test_ablations.py", "unit/training/test_planned_memory.py"),
    *("unit/weights/test_containers.py", "system/test_main_guard.py", "unit/runs/test_run.py"),
    *("unit/cli/test_main.py", "unit/data/test_hostile_data.py", "unit/runs/test_health.py"),
    *("unit/runs/test_resume.py", "unit/models/test_vit.py", "unit/runs/test_batch_norm_run.py"),
    *("unit/runs/test_batch_sources.py", "unit/runs/test_choice.py", "unit/runs/test_vtab.py"),
    *("unit/runs/test_representation.py", "unit/inspection/test_saliency.py", "unit/training/test_running_stats.py"),
    *("unit/data/test_large_jpegs.py", "unit/serving/test_decoding.py", "unit/runs/test_damaged_run.py"),
    *("unit/weights/test_targets.py", "unit/weights/test_formats_torch.py", "unit/runs/test_evaluate.py"),
    *("unit/data/test_loader.py", "property/test_cost.py", "unit/data/test_columnar.py"),
    *("unit/exporting/test_graph.py", "contract/test_house.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {str(HERE / name): number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: Python's collector need not look at it again, a second each time, nor copy it.

    What tests make is looked at less often than usual: a tenth of all time went into that.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def _least_seconds(call: Callable[..., object], *arguments: object, tries: int = 5) -> float:
    """CPU time of this thread for one call, the least of some: what a call costs itself, on a busy machine too.

    Python's collector stands still meanwhile. In a process that holds the objects of a thousand tests, one of its full rounds
    takes a second, and it begins in whichever call happens to make one object too many. A call that refuses what it is given is
    as good as one that answers.
    """
    spent: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(tries):
            started = time.thread_time()
            with contextlib.suppress(VitlabError):
                call(*arguments)
            spent.append(time.thread_time() - started)
    finally:
        if collecting:
            gc.enable()
    return min(spent)


@pytest.fixture(scope="session")
def least_seconds() -> Callable[..., float]:
    return _least_seconds
