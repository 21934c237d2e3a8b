"""Images inside parquet files, and what `datasets` saves to disk: opened without `datasets`, in bounded memory."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, MissingExtra, VitlabError
from vitlab.data.decode import decode
from vitlab.data.sources import columnar
from vitlab.data.sources.opening import open_data

arrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
NAMES = ["ant", "bee", "cat"]
LABELS = [2, 0, 1, 1, 0, 2, 2]


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = [png(i) for i in range(7)]


def features(**labels: list[str]) -> dict[bytes, bytes]:
    """What `datasets` writes into the schema."""
    described: dict[str, Any] = {"image": {"_type": "Image"}}
    described |= {name: {"names": names, "_type": "ClassLabel"} for name, names in labels.items()}
    return {b"huggingface": json.dumps({"info": {"features": described}}).encode()}


def table(rows: slice = slice(None), *, struct: bool = True, metadata: bool = True, **columns: Any) -> Any:
    images = [{"bytes": raw, "path": f"photos/{i}.png"} if struct else raw for i, raw in enumerate(IMAGES)]
    made = arrow.table({"image": images[rows], "label": LABELS[rows], **columns})
    return made.replace_schema_metadata(features(label=NAMES)) if metadata else made


def save_to_disk(folder: Path, splits: dict[str, Any], per_file: int = 4) -> Path:
    """As `datasets.DatasetDict.save_to_disk` lays it out: Arrow streams, listed in state.json."""
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True)
        names: list[dict[str, str]] = []
        for start in range(0, rows.num_rows, per_file):
            names.append({"filename": f"data-{start // per_file:05}-of-00002.arrow"})
            file = str(folder / split / names[-1]["filename"])
            with arrow.OSFile(file, "wb") as sink, arrow.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_table(rows.slice(start, per_file), max_chunksize=3)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": names, "_split": split}))
        (folder / split / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


@pytest.mark.parametrize("struct", [True, False], ids=["struct", "bytes"])
@pytest.mark.parametrize("metadata", [True, False], ids=["names", "numbers"])
def test_one_parquet_file(tmp_path: Path, struct: bool, metadata: bool) -> None:
    parquet.write_table(table(struct=struct, metadata=metadata), tmp_path / "set.parquet", row_group_size=3)
    data = pickle.loads(pickle.dumps(open_data(tmp_path / "set.parquet").parts["all"]))
    assert data.classes == (tuple(NAMES) if metadata else ("0", "1", "2"))
    assert data.labels.single().tolist() == LABELS
    assert [data.read(i) for i in (6, 0, 3, 2, 5, 1, 4)] == [IMAGES[i] for i in (6, 0, 3, 2, 5, 1, 4)]
    assert list(data.keys[:2]) == (["all/0/0.png", "all/1/1.png"] if struct else ["all/0", "all/1"])
    assert decode(data.read(1), "RGB").shape == (3, 4, 5)


@pytest.mark.parametrize("below", ["", "data"], ids=["folder", "hub"])
def test_files_of_parts_in_a_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    files = {"train-00000-of-00002": (0, 3), "train-00001-of-00002": (3, 5), "validation-00000-of-00001": (5, 6)}
    for name, rows in {**files, "test-00000-of-00001": (6, 7)}.items():
        parquet.write_table(table(slice(*rows)), tmp_path / below / f"{name}.parquet")
    opened = open_data(tmp_path)
    assert {name: len(part) for name, part in opened.parts.items()} == {"train": 5, "val": 1, "test": 1}
    assert opened.parts["train"].labels.single().tolist() == LABELS[:5]
    assert [opened.parts["train"].read(i) for i in range(5)] == IMAGES[:5]
    assert opened.parts["test"].read(0) == IMAGES[6]


def test_saved_data_set(tmp_path: Path) -> None:
    folder = save_to_disk(
        tmp_path / "saved", {"train": table(slice(0, 5)), "test": table(slice(5, 7)), "extra": table()}
    )
    opened = open_data(folder)
    assert {name: len(part) for name, part in opened.parts.items()} == {"train": 5, "test": 2}
    assert opened.notes == ("not used: extra",)
    assert opened.classes == tuple(NAMES)
    train = pickle.loads(pickle.dumps(opened.parts["train"]))
    assert [train.read(i) for i in (4, 0, 3, 1, 2)] == [IMAGES[i] for i in (4, 0, 3, 1, 2)]
    assert open_data(folder / "train").parts["all"].labels.single().tolist() == LABELS[:5], "one split alone"


def test_two_splits_for_the_same_part_are_refused(tmp_path: Path) -> None:
    splits = {"train": table(), "val": table(slice(0, 3)), "validation": table(slice(3, 7))}
    with pytest.raises(FileProblem, match=r"two splits for val: .*val.*validation"):
        open_data(save_to_disk(tmp_path / "saved", splits))


def test_test_images_without_labels_are_not_used(tmp_path: Path) -> None:
    secret = table(slice(0, 2)).set_column(1, "label", arrow.array([-1, -1]))
    opened = open_data(save_to_disk(tmp_path / "saved", {"train": table(), "test": secret}))
    assert list(opened.parts) == ["train"]
    assert opened.notes == ("not used, since there are no labels: test",)


def test_texts_several_labels_splits_and_groups(tmp_path: Path) -> None:
    texts = arrow.table({"image": IMAGES, "label": ["b", "a", "a", "b", "c", "c", "a"]})
    parquet.write_table(texts, tmp_path / "texts.parquet")
    assert open_data(tmp_path / "texts.parquet").classes == ("a", "b", "c")
    several = [["b", "a"], [], ["c"], ["a"], ["b"], ["a", "c"], ["c"]]
    rows = {"image": IMAGES, "label": several, "group": list("xxyyzzz"), "split": ["train"] * 5 + ["valid", "test"]}
    parquet.write_table(arrow.table(rows), tmp_path / "several.parquet")
    opened = open_data(tmp_path / "several.parquet")
    train = opened.parts["train"]
    assert [train.labels[i] for i in range(3)] == [(1, 0), (), (2,)]
    assert train.groups == list("xxyyz")
    assert opened.parts["val"].read(0) == IMAGES[5] and len(opened.parts["test"]) == 1


def test_zero_is_a_group_and_an_unknown_split(tmp_path: Path) -> None:
    rows = {"image": IMAGES, "label": LABELS, "group": [0, 0, 1, 1, 2, None, 2]}
    parquet.write_table(arrow.table(rows), tmp_path / "groups.parquet")
    assert open_data(tmp_path / "groups.parquet").parts["all"].groups == ["0", "0", "1", "1", "2", "", "2"]
    parquet.write_table(arrow.table({**rows, "split": [0] * 7}), tmp_path / "splits.parquet")
    with pytest.raises(FileProblem, match="has the split '0'"):
        open_data(tmp_path / "splits.parquet")


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    rows = {"img": IMAGES, "fine": LABELS, "coarse": [0] * 7}
    both = arrow.table(rows).replace_schema_metadata(features(fine=NAMES, coarse=["all"]))
    parquet.write_table(both, tmp_path / "two.parquet")
    with pytest.raises(FileProblem, match=r"no column 'label'.*img, fine, coarse") as reported:
        open_data(tmp_path / "two.parquet")
    assert "--columns image=NAME,label=NAME" in str(reported.value)
    assert open_data(tmp_path / "two.parquet", columns={"label": "fine"}).classes == tuple(NAMES)
    parquet.write_table(both.drop_columns(["coarse"]), tmp_path / "one.parquet")
    assert open_data(tmp_path / "one.parquet").parts["all"].labels.single().tolist() == LABELS
    with pytest.raises(VitlabError, match="no column for 'path'"):
        open_data(tmp_path / "one.parquet", columns={"path": "img"})


@pytest.mark.parametrize("start", slow_after(1, range(0, 28, 7)))
def test_damage_is_an_error_of_ours(tmp_path: Path, start: int) -> None:
    """Every seventh byte, in four turns."""
    folder = save_to_disk(tmp_path / "saved", {"train": table()}, per_file=7)
    file = folder / "train" / "data-00000-of-00002.arrow"
    parquet.write_table(table(), tmp_path / "set.parquet")
    for path, place in ((file, folder), (tmp_path / "set.parquet", tmp_path / "set.parquet")):
        whole, refused = path.read_bytes(), 0
        for at in range(start, len(whole), 28):
            path.unlink()  # a new file: what was mapped before stays as it was
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
            for held in (columnar._mapped, columnar._mapped_column, columnar._parquet):
                held.cache_clear()
            columnar._held.clear()
            try:
                for dataset in open_data(place).parts.values():
                    for i in range(len(dataset)):
                        dataset.read(i)
            except VitlabError:
                refused += 1
        assert refused, path


REWRITTEN = """
import os, sys, pyarrow, pathlib
from pyarrow import parquet
from vitlab.core.errors import FileProblem
from vitlab.data.sources.columnar import open_columnar

def write(label, count, size):
    rows = pyarrow.table({"image": [os.urandom(size) for _ in range(count)], "label": [label] * count})
    if path.suffix == ".parquet":
        return parquet.write_table(rows, path)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)

for path in map(pathlib.Path, sys.argv[1:]):
    write("old", 40, 100_000)
    before = open_columnar(path).parts["all"]
    before.read(39)
    write("new", 3, 50)  # over the old one, whose pages are gone then
    try:
        before.read(30)
    except FileProblem as error:
        print(error.what.removeprefix(f"{path} "))
    after = open_columnar(path).parts["all"]
    print(after.classes, [len(after.read(i)) for i in range(len(after))])
    os.utime(path, (0, 0))
    print(len(after.read(2)))
"""


@pytest.mark.slow
def test_a_file_that_is_rewritten_is_read_anew(tmp_path: Path) -> None:
    """In a process of its own: a page that is cut off from a mapped file kills whoever reads it."""
    command = [sys.executable, "-c", REWRITTEN, *(str(tmp_path / f"set{ending}") for ending in (".parquet", ".arrow"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == 2 * ["was rewritten after it had been opened", "('new',) [50, 50, 50]", "50"]


def test_missing_bytes_and_missing_package_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = arrow.table(
        {"image": [{"bytes": None, "path": "/a.png"}, {"bytes": IMAGES[0], "path": "b"}], "label": [0, 1]}
    )
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(rows.set_column(0, "image", rows["image"].cast(kind)), tmp_path / "set.parquet")
    data = open_data(tmp_path / "set.parquet").parts["all"]
    with pytest.raises(FileProblem, match="has no bytes in"):
        data.read(0)
    assert data.read(1) == IMAGES[0]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'vitlab\[parquet\]'"):
        open_data(tmp_path)


PEAK = """
import sys, pyarrow
from vitlab.data.sources import columnar
from vitlab.data.sources.opening import open_data
columnar._HELD_BYTES = 20_000_000
data = open_data(sys.argv[1]).parts["all"]
total = sum(len(data.read(i * 37 % len(data))) for i in range(len(data)))
print(total, pyarrow.default_memory_pool().max_memory(), sum(held.nbytes for held in columnar._held.values()))
"""


@pytest.mark.slow
def test_memory_is_bounded_however_large_the_file_is(tmp_path: Path) -> None:
    images = [os.urandom(200_000) for _ in range(400)]
    rows = arrow.table({"image": images, "label": [0, 1] * 200})
    parquet.write_table(rows, tmp_path / "large.parquet", row_group_size=20)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "large.parquet")]
    total, peak, held = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert total == 80_000_000
    assert 10_000_000 < held <= 20_000_000
    assert peak < 40_000_000, "what is held, and the row group that is being read"
