"""`vitlab serve`: from the options to a listening server."""

import asyncio
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from vitlab.core import reading
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, MissingExtra, UsageError, require
from vitlab.core.launch import require_main_guard
from vitlab.core.planned import stop_if_dry_run
from vitlab.options.option import takes
from vitlab.options.serving_options import ServeOptions
from vitlab.serving.settings import Limits, ModelSettings, Source

TOKEN_VARIABLE = "VITLAB_TOKEN"
_SHORTEST_TOKEN, _LONGEST_TOKEN = 8, 4096
_LOCAL = ("127.0.0.1", "::1", "localhost")
_MB = 2**20
_INNER = ("bundle",)  # folders that are named by the one around them


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server did until it was stopped."""

    address: str
    models: list[str]
    requests: int
    images: int

    def sentences(self) -> list[str]:
        return [f"Answered {self.requests:,} requests with {self.images:,} images."]


@takes(ServeOptions)
def serve(options: ServeOptions) -> Served:
    """Answer over HTTP until SIGINT or SIGTERM: a page at `/`, and `/v1/predict`, `/v1/embed` and `/v1/explain` for programs.

    Several models are named `name=path`; the first is the default. Stops gracefully: what was admitted is answered first.
    """
    limits = _limits(options)
    sources = _sources(options.models)
    token = _token(options.token_file)
    console = Console(quiet=options.quiet)
    require(0 <= options.port < 2**16, f"--port must lie in 0 to 65535, not {options.port}")
    _require_extra()
    if options.dry_run:
        _stop_if_dry_run(options, sources, token)
    require_main_guard()
    from vitlab.serving.admission import Visitors
    from vitlab.serving.app import make_app
    from vitlab.serving.listening import bound_socket, listen
    from vitlab.serving.service import Service

    sock = bound_socket(options.host, options.port)
    address = f"http://{_shown_host(options.host)}:{sock.getsockname()[1]}"
    service = Service(ModelSettings(sources, options.device, options.threads), limits)
    visitors = Visitors(frozenset(name.lower() for name in options.allow_host), token, options.host.lower())
    if options.host not in _LOCAL and token is None:
        console.say("warning: everybody who can reach this machine may use the server; --token-file asks for a token.")

    console.say(f"Loading {', '.join(source.path for source in sources)}")

    def started() -> None:
        console.say(f"Serving {', '.join(source.name for source in sources)} at {address}")
        console.say(f"Try it:  curl -F image=@photo.jpg {address}/v1/predict")

    asyncio.run(listen(make_app(service, visitors, console), service, sock, started))
    counts = service.metrics
    return Served(
        address,
        [source.name for source in sources],
        int(sum(counts.requests.values.values())),
        int(sum(counts.images.values.values())),
    )


def _stop_if_dry_run(options: ServeOptions, sources: tuple[Source, ...], token: str | None) -> None:
    """After a look at every model, in this process."""
    from vitlab.engines.classifier import describe_model, load, stop_dry_run_before_download

    would = {
        "address": f"http://{_shown_host(options.host)}:{options.port}",
        "token": "none" if token is None else "needed",
    }
    stop_dry_run_before_download(True, [source.path for source in sources], would)
    found = [
        f"{source.name}: {describe_model(load(source.path, device=options.device, quiet=True))}" for source in sources
    ]
    stop_if_dry_run(True, {"models": found, **would})


def _require_extra() -> None:
    try:
        import httptools  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import python_multipart  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import starlette  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtra(error.name or "starlette", "serve", "serving a model") from None


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _sources(given: str | Path | Sequence[str | Path]) -> tuple[Source, ...]:
    """With the name of each: the given one, or one made from its path."""
    found = list[Source]()
    for each in [given] if isinstance(given, str | Path) else given:
        name, equals, path = str(each).partition("=")
        if not equals or Path(each).exists():
            name, path = _usual_name(str(each)), str(each)
        require(bool(re.fullmatch(r"[\w.@+-]{1,64}", name)), f"'{name}' cannot be the name of a model in an address")
        require(bool(path), f"'{each}' names no model")
        taken = {source.name for source in found}
        require(name not in taken, f"two models are called {name}", hint="Name one of them: NAME=PATH.")
        found.append(Source(name, path))
    if not found:
        raise UsageError("no model was given")
    return tuple(found)


def _usual_name(path: str) -> str:
    """`pets` of `runs/pets/bundle`, `ViT-B-16@augreg` of the published name."""
    if not Path(path).exists():
        return re.sub(r"[^\w.@+-]+", "-", path).strip("-")[:64]
    parts = [part for part in Path(path).resolve().parts if part not in _INNER]
    return (
        re.sub(r"[^\w.@+-]+", "-", Path(parts[-1]).stem if Path(path).is_file() else parts[-1]).strip("-")[:64]
        or "model"
    )


def _token(file: str | Path | None) -> str | None:
    text = os.environ.get(TOKEN_VARIABLE)
    if file is not None:
        try:
            text = reading.read_text(Path(file))
        except OSError as error:
            raise FileProblem(f"{file} cannot be read: {error.strerror or error}") from None
    if text is None:
        return None
    token = text.strip()
    if not (_SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN and token.isascii() and token.isprintable()):
        where = file if file is not None else TOKEN_VARIABLE
        raise UsageError(
            f"the token in {where} must be {_SHORTEST_TOKEN} or more printable ASCII characters in one line"
        )
    return token


def _limits(options: ServeOptions) -> Limits:
    for name in ("max_batch", "max_queue", "decoders", "max_connections"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in (
        *("queue_seconds", "deadline", "max_body_mb", "receive_seconds"),
        *("decode_seconds", "decode_memory_mb", "model_seconds", "load_seconds"),
    ):
        require(0 < getattr(options, name) < 1e6, f"--{name.replace('_', '-')} must be above 0")
    for name in ("max_wait_ms", "grace_seconds"):
        require(0 <= getattr(options, name) < 1e6, f"--{name.replace('_', '-')} must not be negative")
    return Limits(
        max_batch=options.max_batch,
        max_wait=options.max_wait_ms / 1000,
        max_queue=options.max_queue,
        queue_seconds=options.queue_seconds,
        deadline=options.deadline,
        max_body=int(options.max_body_mb * _MB),
        max_bodies=max(Limits.max_bodies, 2 * int(options.max_body_mb * _MB)),
        decoders=options.decoders,
        decode_seconds=options.decode_seconds,
        decode_memory=int(options.decode_memory_mb * _MB),
        model_seconds=options.model_seconds,
        load_seconds=options.load_seconds,
        max_connections=options.max_connections,
        receive_seconds=options.receive_seconds,
        grace=options.grace_seconds,
        drain=max(Limits.drain, options.deadline + 1),  # whoever was admitted is answered
    )
