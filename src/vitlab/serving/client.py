"""A client for `vitlab serve`, with nothing but Python's own library.

client = Client("http://127.0.0.1:8000")
client.predict("photo.jpg")           # [{"label": "cat", "index": 3, "p": 0.98}, ...]
client.predict(["a.jpg", "b.jpg"])    # a list for each
"""

import http.client
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from vitlab.core import reading
from vitlab.core.errors import FileProblem, UsageError, VitlabError

ImageFile = str | Path | bytes  # a path, or the bytes of an image file
_BUSY = 503
_LONGEST_PAUSE = 10.0
_LARGEST = 2**30


class ServerRefusal(VitlabError):
    """The server's answer to what it does not do, with its `code` and HTTP `status`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"the server answered {status}, {code}: {message}")
        self.status, self.code = status, code


class Client:
    """Asks one server, over one connection. Not for several threads at once: give each a client."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 5) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{url}' is not the address of a server", hint="Write http://127.0.0.1:8000.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout)
        self._prefix = parts.path.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._retries = retries  # while the server is busy, with the pause that it asks for

    def predict(self, images: ImageFile | Sequence[ImageFile], *, top: int = 5, model: str | None = None) -> Any:
        """The `top` most probable labels: a list for one image, a list of lists for several."""
        return self._images("/v1/predict", images, "top", {"top": str(top), "model": model})

    def embed(self, images: ImageFile | Sequence[ImageFile], *, model: str | None = None) -> Any:
        """One vector for each image."""
        return self._images("/v1/embed", images, "vector", {"model": model})

    def explain(
        self, image: ImageFile, *, method: str | None = None, label: str | None = None, model: str | None = None
    ) -> bytes:
        """The saliency map over the image, as the bytes of a PNG."""
        query = {"method": method, "label": label, "model": model}
        headers = {"Accept": "image/png", "Content-Type": "application/octet-stream"}
        return self._ask("POST", "/v1/explain", query, _bytes(image), headers)

    def models(self) -> list[dict[str, Any]]:
        """What is served, the default first."""
        return json.loads(self._ask("GET", "/v1/models", {}, None, {}))["models"]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    def _images(
        self, path: str, images: ImageFile | Sequence[ImageFile], key: str, query: dict[str, str | None]
    ) -> Any:
        several = not isinstance(images, str | Path | bytes)
        boundary = secrets.token_hex(16)
        given: list[ImageFile] = list(images) if not isinstance(images, str | Path | bytes) else [images]
        body = b"".join(_part(boundary, number, image) for number, image in enumerate(given))
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        found = json.loads(self._ask("POST", path, query, body + f"--{boundary}--\r\n".encode(), headers))["results"]
        for one in found:
            if "error" in one:
                raise ServerRefusal(422, one["error"]["code"], f"{one['name']}: {one['error']['message']}")
        return [one[key] for one in found] if several else found[0][key]

    def _ask(
        self, method: str, path: str, query: dict[str, str | None], body: bytes | None, headers: dict[str, str]
    ) -> bytes:
        given = urlencode({name: value for name, value in query.items() if value is not None})
        address = f"{self._prefix}{path}{f'?{given}' if given else ''}"
        status, pause, data = self._once(method, address, body, headers | self._headers)
        for _ in range(self._retries):
            if status != _BUSY:
                break
            time.sleep(pause)
            status, pause, data = self._once(method, address, body, headers | self._headers)
        if status == 200:
            return data
        try:
            error = json.loads(data)["error"]
            raise ServerRefusal(status, str(error["code"]), str(error["message"]))
        except (ValueError, KeyError, TypeError):
            raise ServerRefusal(status, "unknown", "no explanation was given") from None

    def _once(self, method: str, address: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, float, bytes]:
        for again in (False, True):
            try:
                self._connection.request(method, address, body, headers)
                answer = self._connection.getresponse()
                pause = answer.getheader("retry-after", "1")
                seconds = float(pause) if pause.isascii() and pause.isdigit() else 1.0
                return answer.status, min(seconds, _LONGEST_PAUSE), answer.read()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self._connection.close()
                if again:  # a kept connection may have been closed while nobody used it; a new one has no such reason
                    raise VitlabError("the server closed the connection without an answer") from None
            except OSError as error:
                self._connection.close()
                raise VitlabError(f"the server cannot be reached: {error.strerror or error}") from None
        raise AssertionError


def _part(boundary: str, number: int, image: ImageFile) -> bytes:
    name = str(number) if isinstance(image, bytes) else Path(image).name
    quoted = name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{quoted}"\r\n\r\n'
    return head.encode("utf-8", "replace") + _bytes(image) + b"\r\n"


def _bytes(image: ImageFile) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return reading.read_bytes(image, _LARGEST)
    except OSError as error:
        raise FileProblem(f"{image} cannot be read: {error.strerror or error}") from None
