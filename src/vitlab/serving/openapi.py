"""The OpenAPI 3.1 document: written by hand, because statuses and limits are ours; errors follow from their table."""

from collections.abc import Sequence
from typing import Any

from vitlab.serving.errors import PROBLEMS
from vitlab.serving.settings import Limits

MOST_LABELS = 1000
DETAILS = ("full", "map")
_EXAMPLE_TOP = [{"label": "tabby", "index": 281, "p": 0.62}, {"label": "tiger cat", "index": 282, "p": 0.21}]
_ALWAYS = (400, 401, 403, 408, 431, 500, 503)
_OF_A_BODY = (404, 411, 413, 415, 422, 504)


def document(limits: Limits) -> dict[str, Any]:
    """What GET /openapi.json answers."""
    model = _query("model", {"type": "string"}, "The name of a served model; default: the first.")
    top = _query("top", {"type": "integer", "minimum": 1, "maximum": MOST_LABELS, "default": 5}, "How many labels.")
    method = _query("method", {"type": "string"}, "How the map is made: one of `methods` of the model.")
    label = _query("label", {"type": "string"}, "What the map is about; default: the likeliest label.")
    detail = _query("detail", {"enum": DETAILS, "default": "full"}, "`map` leaves out photo, rollout and heads.")
    post = {
        "/v1/predict": _post("The most probable labels of images", [model, top], limits, _json("Predictions")),
        "/v1/embed": _post("One vector for each image", [model], limits, _json("Embeddings")),
        "/v1/explain": _post(
            "Which patches of one image the answer depends on",
            [model, method, label, detail],
            limits,
            _json("Explanation") | {"image/png": {"schema": {"type": "string", "format": "binary"}}},
        ),
    }
    get = {
        "/v1/models": _get("All served models, the default first", _json("Models")),
        "/v1/model": _get("One served model", _json("Model"), 404, 422, parameters=[model]),
        "/healthz": _get("Whether the server runs, and can load its model", _json("Status")),
        "/readyz": _get("Whether it answers: not while it loads, stops, or replaces its model", _json("Status")),
        "/metrics": _get("Counters for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _get("This document", {"application/json": {"schema": {"type": "object"}}}),
        "/": _get("A page to try the model on", {"text/html": {"schema": {"type": "string"}}}, 404),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vitlab serve",
            "version": "1",
            "description": "Image classification, embeddings and explanations. Images are sent as bytes, never as addresses.",
        },
        "paths": {path: {"post": operation} for path, operation in post.items()}
        | {path: {"get": operation} for path, operation in get.items()},
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _query(name: str, schema: dict[str, Any], what: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": what}


def _json(schema: str) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    return {"application/json": media | ({"example": _EXAMPLES[schema]} if schema in _EXAMPLES else {})}


def _get(
    what: str, content: dict[str, Any], *statuses: int, parameters: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    found = {"200": {"description": what, "content": content}}
    return {"summary": what, "parameters": list(parameters), "responses": found | _problems(*_ALWAYS, *statuses)}


def _post(what: str, parameters: list[dict[str, Any]], limits: Limits, content: dict[str, Any]) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    several = {"type": "array", "items": binary["schema"], "minItems": 1, "maxItems": limits.max_images}
    form = {"schema": {"type": "object", "properties": {"image": several}, "required": ["image"]}}
    return {
        "summary": what,
        "parameters": parameters,
        "requestBody": {
            "description": f"One image, or parts named `image`; {limits.max_body:,} bytes at most, with a Content-Length.",
            "required": True,
            "content": {
                "image/jpeg": binary,
                "image/png": binary,
                "application/octet-stream": binary,
                "multipart/form-data": form,
            },
        },
        "responses": {"200": {"description": what, "content": content}} | _problems(*_ALWAYS, *_OF_A_BODY),
    }


def _problems(*statuses: int) -> dict[str, Any]:
    found = dict[str, Any]()
    for status in sorted(statuses):
        rows = {code: problem for code, problem in PROBLEMS.items() if problem.status == status}
        examples = {code: {"value": {"error": {"code": code, "message": rows[code].message}}} for code in rows}
        media = {"schema": {"$ref": "#/components/schemas/Error"}, "examples": examples}
        found[str(status)] = {"description": ", ".join(rows), "content": {"application/json": media}}
        if status == 503:
            found["503"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return found


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


_TEXT, _NUMBER, _WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_NAME = {"type": ["string", "null"], "description": "The file name that was sent, if there was one."}
_PROBLEM = _object({"code": {"enum": list(PROBLEMS)}, "message": _TEXT})
_LABEL = _object({"label": _TEXT, "index": _WHOLE, "p": _NUMBER}, {"has": {"type": "boolean"}})
_MODEL = _object(
    {
        "name": _TEXT,
        "architecture": _TEXT,
        "image_size": {"type": "array", "items": _WHOLE},
        "labels": {"type": "array", "items": _TEXT},
        "several_labels": {"type": "boolean"},
        "dimensions": _WHOLE,
        "parameters": _WHOLE,
        "preprocess": {"type": "object"},
        "methods": {"type": "array", "items": _TEXT},
        "card": _TEXT,
        "device": _TEXT,
        "limits": _object({"image_bytes": _WHOLE, "images_per_request": _WHOLE}),
    }
)


def _results(key: str, kind: dict[str, Any]) -> dict[str, Any]:
    """In the order of the images: what was found, or what was wrong with this one."""
    return {
        "type": "array",
        "items": {"anyOf": [_object({"name": _NAME, key: kind}), _object({"name": _NAME, "error": _PROBLEM})]},
    }


_SCHEMAS: dict[str, Any] = {
    "Error": _object({"error": _PROBLEM}),
    "Predictions": _object({"model": _TEXT, "results": _results("top", {"type": "array", "items": _LABEL})}),
    "Embeddings": _object(
        {"model": _TEXT, "dimensions": _WHOLE, "results": _results("vector", {"type": "array", "items": _NUMBER})}
    ),
    "Explanation": _object({"model": _TEXT, "top": {"type": "array", "items": _LABEL}, "map": {"type": "object"}}),
    "Models": _object({"models": {"type": "array", "items": _MODEL}}),
    "Model": _MODEL,
    "Status": _object({"status": _TEXT}),
}
_EXAMPLES: dict[str, Any] = {
    "Predictions": {"model": "pets", "results": [{"name": "photo.jpg", "top": _EXAMPLE_TOP}]},
    "Embeddings": {"model": "pets", "dimensions": 3, "results": [{"name": None, "vector": [0.12, -1.5, 0.07]}]},
    "Status": {"status": "ready"},
}
