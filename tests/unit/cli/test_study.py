"""`vitlab study`, as typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_list_names_every_table(call: Callable[..., Any]) -> None:
    said = call("study", "list")
    assert said.code == 0 and "table2" in said.out and "v2, v1" in said.out
    rows = json.loads(call("study", "list", "--json").out)
    assert {"table2", "table9", "augreg", "bit"} <= {row["name"] for row in rows}


def test_report_prints_the_paper_and_writes_a_page(call: Callable[..., Any]) -> None:
    said = call("study", "report", "table2")
    assert said.code == 0 and "88.55 ± 0.04" in said.out and "From v1 to v2" in said.out and said.err == ""
    said = call("study", "report", "table2", "--out", "page.html")
    assert said.code == 0 and "Written to page.html." in said.out
    assert "88.55 ± 0.04" in Path("page.html").read_text(encoding="utf-8")
    assert json.loads(call("study", "report", "table9", "--json").out)["table"] == "table9"


def test_wrong_calls_leave_with_2_and_one_sentence(call: Callable[..., Any]) -> None:
    said = call("study", "report", "table22")
    assert (said.code, said.out) == (2, "") and "unknown study 'table22'" in said.err and "Traceback" not in said.err
    assert call("study", "report", "table2", "--gpu-tflops", "0").code == 2
    Path("records").mkdir()
    Path("records/x.json").write_text("{}")
    said = call("study", "report", "table2", "--records", "records")
    assert said.code == 1 and "x.json is not a record" in said.err
