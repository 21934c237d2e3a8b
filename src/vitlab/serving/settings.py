"""What bounds the server: every limit in one frozen value, which processes hand to each other. Loads no torch."""

import dataclasses
from typing import Any

from vitlab.data.rules import Preprocess

_OTHER_FILES = 128  # descriptors for pipes, libraries, and the processes to be started
LOADER = "vitlab.serving.model_process:load_model"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Times are in seconds and sizes in bytes."""

    max_batch: int | None = None  # images; None: 8 on a CPU, 32 elsewhere
    max_wait: float = 0.0  # for a batch to fill while the model is idle
    max_queue: int | None = None  # images admitted and not yet answered; None: three batches
    queue_seconds: float = 20.0  # of the model's work that may be admitted ahead
    deadline: float = 24.0  # of a request, from its last byte to its answer
    max_body: int = 32 * 2**20
    max_images: int = 16  # in one request
    max_bodies: int = 256 * 2**20  # bytes of all requests together
    decoders: int | None = None  # processes; None: one less than there are cores, at least two and at most eight
    decode_seconds: float = 10.0
    decode_memory: int = 2**30
    model_seconds: float = 60.0  # for one batch, before the model's process is taken to hang
    load_seconds: float = (
        600.0  # for all models, before their process is taken to hang; a published one is downloaded first
    )
    max_connections: int = 1024
    max_header: int = 16 * 2**10
    receive_seconds: float = 8.0
    keep_alive: float = 5.0
    grace: float = 0.0  # between `not ready` and the end of listening
    drain: float = 25.0  # longer than the deadline: whoever was admitted is answered

    def within_system(self) -> "Limits":
        """With no more connections than there are descriptors for: accepting would fail, and everybody wait."""
        try:
            import resource
        except ImportError:  # Windows has no such limit
            return self
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY:
            return self
        most -= min(_OTHER_FILES, most // 2)
        return dataclasses.replace(self, max_connections=max(1, min(self.max_connections, most)))


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to serve: its name, and the argument of the function that makes it."""

    name: str
    path: str


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """All that a model process is started with."""

    sources: tuple[Source, ...]
    device: str = "auto"
    threads: int | None = None
    factory: str = LOADER  # `module:function` of (path, device): a Classifier


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What the front knows about a model, from the process that has loaded it."""

    name: str
    architecture: str
    labels: tuple[str, ...]
    several_labels: bool
    dimensions: int  # of an embedding
    parameters: int
    preprocess: Preprocess
    methods: tuple[str, ...]  # of explain
    card: str
    device: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"image_size": list(self.preprocess.image_size)}
