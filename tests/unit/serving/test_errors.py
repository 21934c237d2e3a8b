"""Everything that the server can answer with: fixed texts, documented statuses."""

import json
import re

from vitlab.serving.errors import PROBLEMS, Refusal
from vitlab.serving.openapi import document
from vitlab.serving.settings import Limits


def test_texts_are_sentences_without_anything_of_the_inside() -> None:
    for problem in PROBLEMS.values():
        assert problem.message.endswith(".") and not re.search(r"0x|/home|Traceback|\d\.\d", problem.message)


def test_refusals_carry_the_headers_of_their_status() -> None:
    assert Refusal("queue_full").headers() == {"retry-after": "1"}
    assert "www-authenticate" in Refusal("bad_token").headers() and Refusal("bad_image").headers() == {}


def test_every_status_is_documented_somewhere() -> None:
    made = document(Limits())
    operations = [operation for path in made["paths"].values() for operation in path.values()]
    statuses = {int(status) for operation in operations for status in operation["responses"]}
    assert statuses >= {problem.status for problem in PROBLEMS.values()} - {405}, "405 has no operation"
    json.dumps(made, allow_nan=False)


def test_references_of_the_document_resolve() -> None:
    made = document(Limits())
    names = re.findall(r"#/components/schemas/(\w+)", json.dumps(made))
    assert names and set(names) <= set(made["components"]["schemas"])
