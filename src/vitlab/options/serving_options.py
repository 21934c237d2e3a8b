"""The options of `serve`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import Device, DryRun, Opt, Quiet, StrPath, Threads, opt

_WHO, _BATCHES, _LIMITS = "Who may ask", "Batches and queue", "Limits"


@dataclass(frozen=True)
class ServeOptions:
    models: Annotated[
        StrPath | Sequence[StrPath],
        Opt("Bundles, runs, files of weights or published names; NAME=PATH gives one a name.", "MODEL"),
    ]
    _: KW_ONLY
    host: str = opt("127.0.0.1", "The address to listen on; 0.0.0.0 for all of this machine's.", "ADDRESS")
    port: int = opt(8000, "0 for any that is free.", "N")
    token_file: StrPath | None = opt(
        None, "Answer only requests with the token in this file; or set VITLAB_TOKEN.", "FILE", panel=_WHO
    )
    allow_host: Sequence[str] = opt(
        (), "A name under which the server is reached, as behind a proxy; repeatable.", "NAME", panel=_WHO
    )
    max_batch: int | None = opt(None, "Most images at a time; default 8 on a CPU, 32 on a GPU.", "N", panel=_BATCHES)
    max_wait_ms: float = opt(0.0, "How long an idle model waits for a batch to fill.", "MS", panel=_BATCHES)
    max_queue: int | None = opt(
        None, "Most images admitted and not yet answered; default three batches.", "N", panel=_BATCHES
    )
    queue_seconds: float = opt(20.0, "Admit no more than the model can do in this time.", "S", panel=_BATCHES)
    deadline: float = opt(24.0, "How long a request may take.", "S", panel=_LIMITS)
    max_body_mb: float = opt(32.0, "Largest body of a request.", "MB", panel=_LIMITS)
    max_connections: int = opt(1024, "Most connections at a time.", "N", panel=_LIMITS)
    receive_seconds: float = opt(
        8.0, "How long a request may take to arrive, unless it keeps coming.", "S", panel=_LIMITS
    )
    decoders: int | None = opt(None, "Processes that decode images.", "N", panel=_LIMITS)
    decode_seconds: float = opt(10.0, "How long one image may take to decode.", "S", panel=_LIMITS)
    decode_memory_mb: float = opt(1024.0, "How much memory one image may take to decode.", "MB", panel=_LIMITS)
    model_seconds: float = opt(
        60.0, "How long a batch may take before the model's process is replaced.", "S", panel=_LIMITS
    )
    load_seconds: float = opt(
        600.0, "How long models may take to load before their process is replaced.", "S", panel=_LIMITS
    )
    grace_seconds: float = opt(0.0, "At the end: not ready, but still listening, for so long.", "S", panel=_LIMITS)
    device: Device = "auto"
    threads: Threads = None
    quiet: Quiet = False
    dry_run: DryRun = False
