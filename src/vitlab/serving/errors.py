"""Every error that the server can answer with: a code, a status and a fixed text.

No text is made at run time, so none can carry a path, an address, a version or a traceback.
"""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One row of the table."""

    status: int
    message: str


PROBLEMS = {
    "bad_request": Problem(400, "This is not a valid HTTP request."),
    "bad_multipart": Problem(
        400, "The multipart body cannot be read: a part named `image` for each image is expected."
    ),
    "bad_token": Problem(401, "A valid token is needed: Authorization: Bearer TOKEN."),
    "bad_host": Problem(403, "This server does not answer to that Host header. See --allow-host."),
    "bad_origin": Problem(403, "Pages of other sites may not send images to this server."),
    "not_found": Problem(404, "There is nothing at this address. See /openapi.json."),
    "unknown_model": Problem(404, "No model of that name is served. See /v1/models."),
    "bad_method": Problem(405, "This address does not take that method. See /openapi.json."),
    "too_slow": Problem(408, "The request was not received in time."),
    "no_length": Problem(411, "A body needs a Content-Length header."),
    "body_too_large": Problem(413, "The body is larger than this server accepts."),
    "too_many_images": Problem(413, "The body holds more images than one request may have."),
    "bad_media_type": Problem(415, "Send the bytes of one image, or multipart/form-data with parts named `image`."),
    "bad_parameter": Problem(422, "A parameter of the address has a value that is not accepted. See /openapi.json."),
    "unknown_label": Problem(422, "The model has no such label. See /v1/model."),
    "no_labels": Problem(422, "This model has no labels. Use /v1/embed."),
    "cannot_explain": Problem(422, "This model cannot be looked into, as one in an exported file."),
    "no_image": Problem(422, "The body holds no image."),
    "one_image": Problem(422, "Send one image at a time to this address."),
    "bad_image": Problem(422, "The image cannot be read: it is damaged, cut short, or no image."),
    "too_many_pixels": Problem(422, "The image has more pixels than this server accepts."),
    "bad_shape": Problem(422, "The image is too long and thin."),
    "unsupported_format": Problem(
        422, "This server cannot read images of that format. JPEG, PNG and WebP always work."
    ),
    "costly_image": Problem(422, "The image takes more time or memory to decode than this server allows."),
    "headers_too_large": Problem(431, "The header of the request is too large."),
    "internal": Problem(500, "The server failed to answer. Its log says more."),
    "not_finite": Problem(500, "The model gave no finite numbers for this image."),
    "queue_full": Problem(503, "The server is busy. Try again shortly."),
    "not_ready": Problem(503, "The server is starting, stopping, or its model is being loaded. Try again shortly."),
    "model_failed": Problem(503, "The model could not be loaded again. It is tried once more; the log says why."),
    "model_lost": Problem(503, "The model process ended while it worked on this image. Try again shortly."),
    "too_many_connections": Problem(503, "The server has too many open connections. Try again shortly."),
    "deadline": Problem(504, "The answer was not ready within the time that a request may take."),
}
OF_IMAGES = ("bad_image", "too_many_pixels", "bad_shape", "unsupported_format", "costly_image", "not_finite")
RETRY_AFTER_SECONDS = 1


class Refusal(Exception):
    """A request, or one image of it, that is answered with a row of the table."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code, self.problem = code, PROBLEMS[code]

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.problem.message}

    def headers(self) -> dict[str, str]:
        """Those that belong to the status."""
        if self.problem.status == 503:
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
        return {"www-authenticate": "Bearer"} if self.problem.status == 401 else {}
