"""The published tables are what was published: to the digit, with their ± and their gaps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.core.errors import FileProblem, UnknownName
from vitlab.evaluation.published import (
    MISSING,
    PublishedTable,
    aligned,
    differences,
    find_table,
    parse_cell,
    published_tables,
    read_table,
)

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data")).absolute()
SEEDS = Path(os.environ.get("VITLAB_SEEDS", DATA.parent / "seeds"))
needs_seeds = pytest.mark.skipif(not SEEDS.is_dir(), reason="needs the texts in VITLAB_SEEDS")


def text_of(number: int) -> str:
    return next(SEEDS.glob(f"{number:03d}_*.txt")).read_text(encoding="utf-8")


def rows_of(text: str, start: str) -> list[list[str]]:
    """The rows of a table in a text: cells between tabs, the first row beginning with `start`, ± in three spellings."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    rows = [line for line in lines[first:] if line]
    return [
        [cell.replace(r"$\pm$", "±").replace(r"\pm", "±").strip() for cell in line.split("\t")]
        for line in rows[: next(i for i, line in enumerate(rows) if "\t" not in line)]
    ]


def plain(rows: list[list[str]]) -> list[list[str]]:
    return [[re.sub(r"</?b>", "", cell) for cell in row] for row in rows]


def printed(table: PublishedTable) -> list[list[str]]:
    return [
        ["", *(column.title for column in table.columns)],
        *([row.title, *(cell.text for cell in row.cells)] for row in table.rows),
    ]


@needs_seeds
def test_table_2_of_version_1_is_that_of_the_october_2020_text() -> None:
    _, first = find_table("table2")
    assert printed(first) == plain(rows_of(text_of(0), "\tOurs"))


@needs_seeds
@pytest.mark.parametrize("number", [1, 2])
def test_table_2_of_version_2_is_that_of_both_later_texts(number: int) -> None:
    second, _ = find_table("table2")
    rows = plain(rows_of(text_of(number), "\tOurs"))
    rows[2][0] = rows[2][0].replace("Real", "ReaL")  # one of the texts spells it without the capital
    assert printed(second) == rows


@needs_seeds
def test_the_best_of_a_row_is_bold_where_it_was_so() -> None:
    second, _ = find_table("table2")
    bold = [[("<b>" in cell) for cell in row[1:]] for row in rows_of(text_of(1), "\tOurs")[1:]]
    assert [row.best for row in second.rows] == [marks.index(True) if True in marks else None for marks in bold]


@needs_seeds
def test_the_pretraining_sets_are_those_of_the_talk() -> None:
    (table,) = find_table("pretraining-sets")
    assert printed(table) == rows_of(text_of(3), "\t# of Images")


@needs_seeds
def test_a_console_shows_every_cell_of_the_texts() -> None:
    for version, number in zip(find_table("table2"), (2, 0), strict=True):
        for row, line in zip(rows_of(text_of(number), "\tOurs")[1:], version.lines()[2:], strict=True):
            assert re.split(r"\s{2,}", line) == [row[0], *row[1:]]


# Typed in by hand from the paper's tables, a corner and a middle of each; (row, column) -> cell.
CORNERS = {
    "table1": {("ViT-Base", "Params"): "86M", ("ViT-Huge", "Heads"): "16", ("ViT-Large", "MLP size"): "4096"},
    "table5": {
        ("ImageNet: CIFAR-10", "ViT-B/16"): "98.13",
        ("ImageNet: Oxford-IIIT Pets", "ViT-H/14"): MISSING,
        ("ImageNet-21k: ImageNet", "ViT-L/16"): "85.15",
        ("JFT-300M: Oxford-IIIT Pets", "ViT-H/14"): "97.56",
        ("JFT-300M: ImageNet ReaL", "ViT-B/32"): "86.27",
    },
    "figure3": {("ImageNet: ImageNet", "ViT-L/32"): "71.16", ("JFT-300M: ImageNet", "ViT-H/14"): "88.04"},
    "table6": {
        ("ViT-B/32", "ImageNet"): "80.73",
        ("ViT-H/14", "exaFLOPs"): "4262",
        ("R50x1", "Oxford Flowers-102"): "94.26",
        ("R200x3", "CIFAR-100"): "93.53",
    },
    "table7": {("ImageNet", "R50x1 SGD"): "78.24", ("Average", "R152x2 Adam"): "94.01"},
    "table8": {
        ("no positions", "at the stem"): "0.61382",
        ("relative", "every layer"): MISSING,
        ("1-D", "every layer, shared"): "0.64292",
    },
    "table9": {
        ("Caltech101", "ViT-H/14 (JFT)"): "95.3",
        ("sNORB-Elev", "ViT-L/16 (I21k)"): "41.7",
        ("Mean", "ViT-L/16 (JFT)"): "76.3",
    },
    "augreg": {
        ("R50+ViT-L/32", "ImageNet"): "85.99",
        ("ViT-S/32", "V100 img/s"): "2154",
        ("ViT-L/16", "augmentation"): "strong1",
    },
    "bit": {
        ("ObjectNet top-1", "BiT-L"): "58.7",
        ("VTAB (19 tasks)", "BiT-M"): "73.51",
        ("VTAB structured", "BiT-M"): "61.08",
    },
    "objectnet": {("top-5", "ViT-H/14"): "82.1"},
    "replication": {("R50+ViT-B/16", "ImageNet, dropout 0.1"): "85.08", ("ViT-L/32", "CIFAR-10, dropout 0.0"): "99.06"},
    "better-plain": {("as proposed", "90 epochs"): "76.5", ("original", "300 epochs"): "67.1"},
    "self-supervision": {("masked patch prediction on JFT-300M", "ImageNet"): "79.9"},
    "pretraining-sets": {("JFT (Big)", "# of Images"): "300 Million"},
    "table2": {("VTAB (19 tasks)", "BiT-L (ResNet152x4)"): "76.29 ± 1.70"},
}


@pytest.mark.parametrize("name", list(published_tables()))
def test_cells_typed_in_by_hand(name: str) -> None:
    table = find_table(name)[0]
    cells = {(row.title, column.title): cell.text for row, column, cell in reversed(list(table.claims()))}
    assert CORNERS[name].items() <= cells.items()


def test_tables_5_and_6_agree_where_the_paper_lets_them() -> None:
    """The same models after the same training, printed twice; only ViT-H/14 differs, as the paper has it."""
    (five,), (six,) = find_table("table5"), find_table("table6")
    runs = {"ViT-B/32": 7, "ViT-B/16": 7, "ViT-L/32": 7, "ViT-L/16": 14, "ViT-H/14": 14}
    other: set[str] = set()
    for row, column, cell in six.claims():
        model, epochs = row.about["model"], row.about["pretrain_epochs"]
        if runs.get(model) != epochs or "data" not in column.about:
            continue
        twin = next(
            text.text
            for theirs, here, text in five.claims()
            if here.about["model"] == model and theirs.about == {"pretrained_on": "jft", **column.about}
        )
        other |= set() if twin == cell.text else {model}
    assert other == {"ViT-H/14"}


def test_figure_3_is_the_imagenet_rows_of_table_5() -> None:
    (figure,), (five,) = find_table("figure3"), find_table("table5")
    assert list(figure.rows) == [row for row in five.rows if row.title.endswith(": ImageNet")]


def test_averages_of_table_7_are_those_of_its_rows() -> None:
    (table,) = find_table("table7")
    for i in range(len(table.columns)):
        values = [row.cells[i].values[0] for row in table.rows]
        assert round(sum(values[:5]) / 5 + 1e-9, 2) == values[5]


def test_what_changed_between_the_versions_of_table_2() -> None:
    found = differences(*find_table("table2"))
    cells = {(one.row, one.column): (one.older, one.newer) for one in found if one.row and one.column}
    assert cells == {
        ("ImageNet", "Ours-JFT (ViT-H/14)"): ("88.36", "88.55 ± 0.04"),
        ("ImageNet", "Ours-JFT (ViT-L/16)"): ("87.61 ± 0.03", "87.76 ± 0.03"),
        ("ImageNet ReaL", "Ours-JFT (ViT-H/14)"): ("90.77", "90.72 ± 0.05"),
        ("ImageNet ReaL", "Ours-JFT (ViT-L/16)"): ("90.24 ± 0.03", "90.54 ± 0.03"),
        ("VTAB (19 tasks)", "Ours-JFT (ViT-H/14)"): ("77.16 ± 0.29", "77.63 ± 0.23"),
        ("VTAB (19 tasks)", "Ours-JFT (ViT-L/16)"): ("75.91 ± 0.18", "76.28 ± 0.46"),
    }
    rest = [(one.older, one.newer) for one in found if not (one.row and one.column)]
    assert ("TPUv3-days", "TPUv3-core-days") in rest and ("", "new column") in rest
    newest, _ = find_table("table2")
    assert differences(newest, newest) == []


@pytest.mark.parametrize(
    ("text", "values", "spread"),
    [
        ("88.55 ± 0.04", (88.55,), 0.04),
        ("90.54", (90.54,), None),
        ("2.5k", (2500,), None),
        ("307M", (307e6,), None),
        ("88.4/88.5*", (88.4, 88.5), None),
        ("88.4/ 88.5*", (88.4, 88.5), None),
        (MISSING, (), None),
        ("strong1", (), None),
        ("", (), None),
        ("1.3 Million", (), None),
    ],
)
def test_the_numbers_in_a_cell(text: str, values: tuple[float, ...], spread: float | None) -> None:
    cell = parse_cell(text)
    assert (cell.text, cell.values, cell.spread) == (text, pytest.approx(values), spread)


def test_every_table_names_its_source_and_every_claim_a_measure() -> None:
    for versions in published_tables().values():
        for table in versions:
            assert table.source and table.unit in ("per cent", "fraction", "count")
            if table.name != "pretraining-sets":
                assert all("measure" in table.about(row, column) for row, column, _ in table.claims())


def test_unknown_tables_and_broken_ones() -> None:
    assert find_table("Table 2") == find_table("table2")
    with pytest.raises(UnknownName, match="unknown table 'tabel2'") as caught:
        find_table("tabel2")
    assert "table2" in caught.value.nearest
    head = 'name = "x"\nversion = "1"\ntitle = "x"\nsource = "x"\nunit = "count"\ncolumns = [{ title = "a" }]\n'
    with pytest.raises(FileProblem, match="row 'r' has 2 cells for 1 column"):
        read_table(f'{head}[[rows]]\ntitle = "r"\ncells = ["1", "2"]\n', "x.toml")


def test_a_head_in_parentheses_takes_a_second_line() -> None:
    assert aligned([["", "Ours (ViT-H/14)", "n"], ["ImageNet", "88.36", "1"]]) == [
        *("          Ours", "          (ViT-H/14)  n", "ImageNet  88.36       1"),
    ]
    assert aligned([["a", "b"], ["1", ""]]) == ["a  b", "1"]


def test_the_tables_are_read_without_torch() -> None:
    code = "import sys, vitlab.evaluation.published as p; p.published_tables(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
