"""The scripts in `bench/` use names of vitlab that exist: nobody runs them often enough to notice otherwise."""

import ast
import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("script", sorted(path.name for path in BENCH.glob("*.py")))
def test_imports_of_a_benchmark_exist(script: str) -> None:
    for node in ast.walk(ast.parse((BENCH / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vitlab":
            module = importlib.import_module(node.module or "")
            lacking = [name.name for name in node.names if not _has(module, name.name)]
            assert not lacking, f"{script} imports {lacking} from {node.module}"


def _has(module: object, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{getattr(module, '__name__', '')}.{name}")
    except ModuleNotFoundError:
        return False
    return True
