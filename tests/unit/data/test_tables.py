"""Tables of images: what each column means, and one sentence for each way of getting it wrong."""

from pathlib import Path

import pytest

from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.tables import open_table


def table(
    folder: Path, text: str, name: str = "data.csv", images: tuple[str, ...] = ("a.jpg", "b.jpg", "c.jpg")
) -> Path:
    for image in images:
        (folder / image).write_bytes(image.encode())
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_paths_and_labels(tmp_path: Path) -> None:
    data = open_table(table(tmp_path, "path,label\nb.jpg,dog\na.jpg,cat\nc.jpg,dog\n")).parts["all"]
    assert data.classes == ("cat", "dog")
    assert data.keys == ["b.jpg", "a.jpg", "c.jpg"]
    assert data.labels.single().tolist() == [1, 0, 1]
    assert data.read(0) == b"b.jpg"


def test_splits_groups_a_bom_and_tabs(tmp_path: Path) -> None:
    text = "\ufeffPath\tLabel\tSplit\tGroup\na.jpg\tx\tTest\tp1\nb.jpg\ty\ttrain\tp2\nc.jpg\tx\ttrain\tp2\n"
    opened = open_table(table(tmp_path, text, "data.tsv"))
    assert list(opened.parts) == ["train", "test"]
    assert opened.parts["train"].groups == ["p2", "p2"]
    assert opened.parts["test"].classes == ("x", "y")


def test_zero_is_a_group_and_an_unknown_split(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from pyarrow import parquet

    file = table(tmp_path, "", "data.parquet")
    rows = {"path": ["a.jpg", "b.jpg", "c.jpg"], "label": ["x", "y", "x"], "group": [0, 1, None]}
    parquet.write_table(arrow.table(rows), file)
    assert open_table(file).parts["all"].groups == ["0", "1", ""]
    parquet.write_table(arrow.table({**rows, "split": [0, 0, 0]}), file)
    with pytest.raises(FileProblem, match="has the split '0'"):
        open_table(file)


def test_several_labels(tmp_path: Path) -> None:
    data = open_table(table(tmp_path, "path,label\na.jpg,cat; dog\nb.jpg,\nc.jpg,dog;dog\n")).parts["all"]
    assert data.labels.multi
    assert [data.labels[i] for i in range(3)] == [(0, 1), (), (1,)]


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from pyarrow import parquet

    table(tmp_path, "")
    rows = {"path": ["a.jpg", "b.jpg"], "label": [["x", "y"], ["y"]], "split": ["train", "test"]}
    parquet.write_table(arrow.table(rows), tmp_path / "data.parquet")
    opened = open_table(tmp_path / "data.parquet")
    assert opened.parts["train"].labels[0] == (0, 1)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(FileProblem, match="cannot be read as parquet"):
        open_table(tmp_path / "bad.parquet")


def test_columns_can_be_named(tmp_path: Path) -> None:
    text = "label,FileName,Species,fold\n7,a.jpg,cat,train\n8,b.jpg,dog,test\n"
    columns = {"path": "filename", "label": "Species", "split": "fold"}
    opened = open_data(table(tmp_path, text), columns=columns)
    assert opened.classes == ("cat", "dog"), "the column called label is not what was named"
    assert {name: part.keys for name, part in opened.parts.items()} == {"train": ["a.jpg"], "test": ["b.jpg"]}


def test_columns_of_parquet_can_be_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from pyarrow import parquet

    table(tmp_path, "")
    parquet.write_table(arrow.table({"File": ["a.jpg", "b.jpg"], "kind": [1.0, 2.0]}), tmp_path / "t.parquet")
    data = open_data(tmp_path / "t.parquet", columns={"path": "File", "label": "kind"}).parts["all"]
    assert (data.keys, data.classes) == (["a.jpg", "b.jpg"], ("1", "2"))


@pytest.mark.parametrize(
    ("columns", "printed", "hint"),
    [
        ({"path": "image"}, "has no column 'image'; it has: file, kind", "--columns path=image,label=NAME"),
        ({"path": "file"}, "has no column 'label'; it has: file, kind", "--columns path=file,label=NAME"),
        ({"path": "file", "label": "file"}, "cannot be the same one: path=file,label=file", ""),
        ({"file": "path"}, "tables have no column for 'file'", "Known: path, label, split, group"),
    ],
)
def test_missing_columns_are_reported_with_those_present(
    tmp_path: Path, columns: dict[str, str], printed: str, hint: str
) -> None:
    with pytest.raises(VitlabError, match=printed) as reported:
        open_data(table(tmp_path, "file,kind\na.jpg,x\n"), columns=columns)
    assert hint in str(reported.value)


def test_columns_of_what_is_not_a_table_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a table"):
        open_data(tmp_path, columns={"path": "file"})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has no column 'path'"),
        ("file,label\na.jpg,x\n", "has no column 'path'; it has: file, label"),
        ("path,label,label\na.jpg,x,y\n", "names a column twice"),
        ("path,label\n", "lists no images"),
        ("path,label\na.jpg,x,more\n", "line 2: more values than columns"),
        ("path,label\n,x\n", "line 2: no path"),
        ("path,label\na.jpg,x\nb.jpg,\nc.jpg\n", r"line 3: no label \(2 such rows\)"),
        ("path,label\na.jpg,x\nno.jpg,x\n", "lists 1 file that cannot be found: no.jpg"),
        ("path,label,split\na.jpg,x,train\nb.jpg,x,\n", "1 row without a split"),
        ("path,label,split\na.jpg,x,trian\n", "has the split 'trian'"),
        ('path,label\n"a.jpg,x\n', "cannot be read as a table"),
    ],
)
def test_every_slip_gets_a_sentence(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(FileProblem, match=what):
        open_table(table(tmp_path, text))


def test_another_encoding_is_reported(tmp_path: Path) -> None:
    path = table(tmp_path, "")
    path.write_bytes(b"path,label\na.jpg,k\xe9pi\n")
    with pytest.raises(FileProblem, match="UTF-8"):
        open_table(path)


def test_numbers_by_value_parts_by_any_name_and_accents_in_one_form(tmp_path: Path) -> None:
    opened = open_table(table(tmp_path, "path,label,split\na.jpg,10,Training\nb.jpg,9,valid\nc.jpg,9,dev\n"))
    assert opened.classes == ("9", "10")
    assert {name: len(part) for name, part in opened.parts.items()} == {"train": 1, "val": 2}
    assert open_table(table(tmp_path, "path,label\na.jpg,caf\u00e9\nb.jpg,cafe\u0301\n")).classes == ("caf\u00e9",)


def test_whole_floats_of_parquet_are_whole_numbers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    from pyarrow import parquet

    table(tmp_path, "")
    path = tmp_path / "data.PARQUET"
    parquet.write_table(arrow.table({"path": ["a.jpg", "b.jpg"], "label": [3.0, 10.0]}), path)
    assert open_table(path).classes == ("3", "10")
    parquet.write_table(arrow.table({"path": ["a.jpg", "b.jpg"], "label": [3.0, None]}), path)
    with pytest.raises(FileProblem, match="row 1: no label"):
        open_table(path)


def test_table_of_a_spreadsheet_with_semicolons_between_columns(tmp_path: Path) -> None:
    text = '\ufeffpath;label;split\na.jpg;cat;train\nb.jpg;"cat;dog";train\nc.jpg;dog;test\n'
    opened = open_table(table(tmp_path, text))
    assert list(opened.parts) == ["train", "test"]
    train = opened.parts["train"]
    assert [train.labels[i] for i in range(2)] == [(0,), (0, 1)]


def test_other_separators_between_labels_are_reported(tmp_path: Path) -> None:
    for text, sign, several in (
        ("path,label\na.jpg,ants|big\nb.jpg,bees|big\nc.jpg,old wasps\n", "|", "ants;big"),
        ('path,label\na.jpg,"ants, big"\nb.jpg,bees\nc.jpg,bees\n', ",", "ants;big"),
    ):
        opened = open_table(table(tmp_path, text))
        assert len(opened.notes) == 1
        assert f"'{sign}' does not separate labels" in opened.notes[0] and f"write '{several}'" in opened.notes[0]
    for text in (
        "path,label\na.jpg,ants;big\nb.jpg,bees|big\nc.jpg,bees\n",
        "path,label\na.jpg,old ants\nb.jpg,old|bees\nc.jpg,bees\n",
        "path,label\na.jpg,|\nb.jpg,bees\nc.jpg,bees\n",
    ):
        assert open_table(table(tmp_path, text)).notes == ()


def test_missing_files_are_looked_for_in_a_folder_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path, "path,label\ngone.jpg,x\na.jpg,y\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileProblem) as caught:
        open_table(Path("data.csv"))
    assert caught.value.hint == f"Paths count from {tmp_path.resolve()}."
