"""Every notebook runs from top to bottom, and is stored without outputs, which would be those of one machine."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _code(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in _read(path)["cells"] if cell["cell_type"] == "code"]


@each_notebook
def test_a_notebook_is_stored_as_jupyter_wants_it_and_without_outputs(path: Path) -> None:
    notebook = _read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs_in_an_empty_folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Jupyter: all cells in one namespace, and the last expression of each is shown, here by its repr."""
    monkeypatch.chdir(tmp_path)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    try:
        for number, source in enumerate(_code(path)):
            *body, last = ast.parse(source, f"{path.name}, code cell {number}").body
            exec(compile(ast.Module(body, []), f"{path.name}:{number}", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"{path.name}:{number}", "eval"), namespace)
                shown += len(repr(value)) > 0
                if hasattr(value, "_repr_html_"):  # a figure of matplotlib, say
                    value._repr_html_()
            else:
                exec(compile(ast.Module([last], []), f"{path.name}:{number}", "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert shown > 5
