"""All nineteen tasks of VTAB-1k in one call, from raw files in the published formats to the mean."""

import importlib.util
import os
from pathlib import Path

import pytest

from vitlab.core.session import open_session
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.vtab import VTAB
from vitlab.evaluation.records import read_records
from vitlab.models.build import create_model
from vitlab.runs.evaluation.vtab import VtabRule, run_vtab
from vitlab.weights.bundle import Bundle, save_bundle

SMALL = (
    *("data.image_size=[16,16]", "train.steps=3", "train.batch_size=8", "train.precision=fp32"),
    "schedule.warmup=1",
)


@pytest.mark.skipif(not os.environ.get("VITLAB_SOAK"), reason="all nineteen tasks take a while; `make soak` runs them")
def test_all_nineteen_tasks_from_raw_files_to_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    script = Path(__file__).parents[1] / "unit" / "data" / "vtab_copies.py"
    found_script = importlib.util.spec_from_file_location("vtab_copies", script)
    assert found_script and found_script.loader
    copies = importlib.util.module_from_spec(found_script)
    found_script.loader.exec_module(copies)
    for lay in copies.SETS.values():
        lay(tmp_path / "data")
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    model = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0)
    save_bundle(tmp_path / "start", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    with open_session("cpu", threads=1, quiet=True) as session:
        found = run_vtab(str(tmp_path / "start"), VtabRule(overrides=SMALL), session, out=tmp_path / "out")
    assert not found.missing and list(found.tasks) == list(VTAB)
    assert found.mean == pytest.approx(sum(found.tasks.values()) / 19)
    assert all(found.groups[group] is not None for group in ("natural", "specialized", "structured"))
    records = {record.data for record in read_records(found.records)}
    assert records == {*(f"vtab:{name}" for name in VTAB), *(f"vtab:{group}" for group in found.groups), "vtab"}
