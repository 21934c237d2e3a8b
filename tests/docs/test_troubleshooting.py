"""The messages that the troubleshooting page explains are those that the code still raises."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
QUOTED = re.findall(r"(?m)^### `(.+)`$", PAGE.read_text(encoding="utf-8"))


def _messages() -> Iterator[str]:
    """Every text in the source, with `…` for what is filled in."""
    for path in (ROOT / "src" / "vitlab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


MESSAGES = set(_messages())


def test_the_page_has_many_messages() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 20


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_occurs_in_the_source(quoted: str) -> None:
    assert any(message.strip() == quoted or message.startswith(quoted) for message in MESSAGES)
