"""The OpenAPI document."""

from typing import Any

from vitlab.serving.settings import Limits

MOST_LABELS = 1000


def document(limits: Limits) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "vitlab", "version": "1"}, "paths": {}}
