"""The options of `serve`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import Device, DryRun, Opt, Quiet, StrPath, Threads

_WHO, _BATCHES, _LIMITS = "Who may ask", "Batches and queue", "Limits"


@dataclass(frozen=True)
class ServeOptions:
    models: Annotated[
        StrPath | Sequence[StrPath],
        Opt("Bundles, runs, files of weights or published names; NAME=PATH gives one a name.", metavar="MODEL"),
    ]
    _: KW_ONLY
    host: Annotated[str, Opt("The address to listen on; 0.0.0.0 for all of this machine's.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Opt("0 for any that is free.", metavar="N")] = 8000
    token_file: Annotated[
        StrPath | None,
        Opt("Answer only requests with the token in this file; or set VITLAB_TOKEN.", metavar="FILE", panel=_WHO),
    ] = None
    allow_host: Annotated[
        Sequence[str],
        Opt("A name under which the server is reached, as behind a proxy; repeatable.", metavar="NAME", panel=_WHO),
    ] = ()
    max_batch: Annotated[
        int | None, Opt("Most images at a time; default 8 on a CPU, 32 on a GPU.", metavar="N", panel=_BATCHES)
    ] = None
    max_wait_ms: Annotated[
        float, Opt("How long an idle model waits for a batch to fill.", metavar="MS", panel=_BATCHES)
    ] = 0.0
    max_queue: Annotated[
        int | None,
        Opt("Most images admitted and not yet answered; default three batches.", metavar="N", panel=_BATCHES),
    ] = None
    queue_seconds: Annotated[
        float, Opt("Admit no more than the model can do in this time.", metavar="S", panel=_BATCHES)
    ] = 20.0
    deadline: Annotated[float, Opt("How long a request may take.", metavar="S", panel=_LIMITS)] = 24.0
    max_body_mb: Annotated[float, Opt("Largest body of a request.", metavar="MB", panel=_LIMITS)] = 32.0
    max_connections: Annotated[int, Opt("Most connections at a time.", metavar="N", panel=_LIMITS)] = 1024
    receive_seconds: Annotated[
        float, Opt("How long a request may take to arrive, unless it keeps coming.", metavar="S", panel=_LIMITS)
    ] = 8.0
    decoders: Annotated[int | None, Opt("Processes that decode images.", metavar="N", panel=_LIMITS)] = None
    decode_seconds: Annotated[float, Opt("How long one image may take to decode.", metavar="S", panel=_LIMITS)] = 10.0
    decode_memory_mb: Annotated[
        float, Opt("How much memory one image may take to decode.", metavar="MB", panel=_LIMITS)
    ] = 1024.0
    model_seconds: Annotated[
        float, Opt("How long a batch may take before the model's process is replaced.", metavar="S", panel=_LIMITS)
    ] = 60.0
    load_seconds: Annotated[
        float, Opt("How long models may take to load before their process is replaced.", metavar="S", panel=_LIMITS)
    ] = 600.0
    grace_seconds: Annotated[
        float, Opt("At the end: not ready, but still listening, for so long.", metavar="S", panel=_LIMITS)
    ] = 0.0
    device: Device = "auto"
    threads: Threads = None
    quiet: Quiet = False
    dry_run: DryRun = False
