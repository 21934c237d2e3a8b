"""`vitlab study`, as typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_records import records_of, write_records

from vitlab.studies.study_file import read_study


def test_list_names_every_table(call: Callable[..., Any]) -> None:
    printed = call("study", "list")
    assert printed.code == 0 and "table2" in printed.out and "v2, v1" in printed.out
    rows = json.loads(call("study", "list", "--json").out)
    assert {"table2", "table9", "augreg", "bit"} <= {row["name"] for row in rows}


def test_report_prints_the_paper_and_writes_a_page(call: Callable[..., Any]) -> None:
    printed = call("study", "report", "table2")
    assert printed.code == 0 and "88.55 ± 0.04" in printed.out and "From v1 to v2" in printed.out and printed.err == ""
    printed = call("study", "report", "table2", "--out", "page.html")
    assert printed.code == 0 and "Written to page.html." in printed.out
    assert "88.55 ± 0.04" in Path("page.html").read_text(encoding="utf-8")
    assert json.loads(call("study", "report", "table9", "--json").out)["table"] == "table9"


def test_wrong_calls_leave_with_2_and_one_sentence(call: Callable[..., Any]) -> None:
    printed = call("study", "report", "table22")
    assert (
        (printed.code, printed.out) == (2, "")
        and "unknown study 'table22'" in printed.err
        and "Traceback" not in printed.err
    )
    assert call("study", "report", "table2", "--gpu-tflops", "0").code == 2
    Path("records").mkdir()
    Path("records/x.json").write_text("{}")
    printed = call("study", "report", "table2", "--records", "records")
    assert printed.code == 1 and "x.json is not a record" in printed.err


# --- studies that are run ---------------------------------------------------------------------------------------------


def test_list_has_studies_before_tables(call: Callable[..., Any]) -> None:
    lines = call("study", "list").out.splitlines()
    assert lines[0].split() == ["study", "laptop", "gpu", "repeats"]
    row = next(line for line in lines if line.startswith("positions "))
    assert row.split()[1:5] == ["1", "min", "7", "min"] and row.endswith("Position embeddings (Table 8, appendix D.4)")
    rows = json.loads(call("study", "list", "--json").out)
    assert [row["kind"] for row in rows] == sorted(row["kind"] for row in rows)
    positions = next(row for row in rows if row["name"] == "positions")
    assert (
        positions["kind"] == "study"
        and positions["cells"] == 40
        and positions["versions"] == ["laptop", "gpu", "paper"]
        and positions["minutes"] == {"laptop": 1, "gpu": 7, "paper": None}
    )


def test_show_prints_the_question_the_claims_and_the_grid(call: Callable[..., Any]) -> None:
    printed = call("study", "show", "positions")
    assert printed.code == 0 and printed.err == ""
    for text in (
        "Does it matter how positions",
        "a model is worse (D.4, Table 8)",
        "1-D | 2-D",
        "laptop: 9 cells, 9 runs, about 1 minute on two cores of an AMD EPYC, seeds 0, 1, 2",
    ):
        assert text in printed.out, text
    assert printed.out.rstrip().endswith("vitlab study run positions --scale laptop")
    one = call("study", "show", "positions", "--scale", "gpu").out
    assert "gpu: 40 cells" in one and "laptop: " not in one
    table = json.loads(call("study", "show", "compute", "--json").out)
    assert list(table["scales"]) == ["laptop", "gpu", "paper"] and len(table["claims"]) == 4
    assert (table["scales"]["laptop"]["cells"], table["scales"]["laptop"]["runs"]) == (21, 42)


def test_dry_run_counts_cells_and_runs_and_writes_nothing(call: Callable[..., Any]) -> None:
    printed = call("study", "run", "positions", "--dry-run")
    assert printed.code == 0 and "9 cells" in printed.out and "9, of which 0 are done" in printed.out
    both = json.loads(call("study", "run", "positions", "pooling", "--seeds", "1", "--dry-run", "--json").out)
    assert both["positions"].startswith("3 cells") and both["pooling"].startswith("4 cells")
    assert both["runs"] == "7, of which 0 are done" and both["out"] == "runs/studies"
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_report_of_a_study_in_every_form(call: Callable[..., Any]) -> None:
    write_records(Path("runs/studies"), records_of(read_study("positions").at("laptop")))
    printed = call("study", "report", "positions")
    assert printed.code == 0 and "9 of 9 cells measured" in printed.out and "3 seeds" in printed.out
    assert json.loads(call("study", "report", "positions", "--json").out)["measured"] == 9
    for name in ("positions", "claims"):
        for suffix in ("md", "html"):
            printed = call("study", "report", name, "--out", f"{name}.{suffix}")
            assert (printed.code, printed.err) == (0, "") and f"Written to {name}.{suffix}." in printed.out
            assert "embeddings a model is worse" in Path(f"{name}.{suffix}").read_text(encoding="utf-8")
    assert "not measured yet" in call("study", "report", "claims").out
    claims = json.loads(call("study", "report", "claims", "--json").out)["claims"]
    assert next(row for row in claims if row["claim"] == "positions-none-worse")["verdict"] == "holds here"


def test_wrong_studies_leave_with_2_and_one_sentence(call: Callable[..., Any]) -> None:
    for words, text in (
        (("show", "posits"), "unknown study 'posits'"),
        (("show", "positions", "--scale", "huge"), "unknown scale 'huge'"),
        (("run", "positions", "--scale", "huge"), "unknown scale 'huge'"),
        (("run", "positions", "--seeds", "9"), "--seeds must be from 1 to 3, not 9"),
        (("run", "positions", "--workers", "0"), "--workers must be at least 1, not 0"),
        (("run",), "NAME"),
        (("report", "claims", "--scale", "huge"), "huge"),
    ):
        printed = call("study", *words)
        assert (printed.code, printed.out) == (2, "") and text in printed.err and "Traceback" not in printed.err, words
    assert list(Path().iterdir()) == []
