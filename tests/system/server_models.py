"""Models for tests of the server, and the server with one of them as a program.

python server_models.py '{"max_batch": 1}'
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import vitlab
from vitlab.core.console import Console
from vitlab.data.rules import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.models.model import Model
from vitlab.weights.bundle import Bundle

SIDE = 16
NAN, EXIT, HANG, SLOW, RAISE = 250, 251, 252, 253, 254  # grey levels of images that do something
SLOW_SECONDS = 1.0
STUCK = "VITLAB_TEST_STUCK"


class _Inert(Model):
    def __init__(self) -> None:
        super().__init__()
        self.spec = vitlab.create_model("ViT-mu/16", num_classes=2, image_size=SIDE).spec
        self.head = None


class Pixels(_Inert):
    """Its embedding is the tensor that it is given."""

    def forward(self, x_BCYX: Tensor, _tape: object = None) -> Tensor:
        return x_BCYX[:, 0, 0, :2]

    def represent(self, x_BCYX: Tensor, _tape: object = None) -> Tensor:
        return x_BCYX.flatten(1)


class Faulty(_Inert):
    """Does what the grey level of an image says."""

    def forward(self, x_BCYX: Tensor, _tape: object = None) -> Tensor:
        return self.represent(x_BCYX)

    def represent(self, x_BCYX: Tensor, _tape: object = None) -> Tensor:
        level_B = ((x_BCYX[:, 0, 0, 0] * 0.5 + 0.5) * 255).round()
        if (level_B == EXIT).any():
            os._exit(1)
        if (level_B == HANG).any():
            time.sleep(600)
        if (level_B == SLOW).any():
            time.sleep(SLOW_SECONDS)
        if (level_B == RAISE).any():
            raise MemoryError
        scores_BK = torch.stack([level_B / 255, 1 - level_B / 255], dim=1)
        scores_BK[level_B == NAN] = float("nan")
        return scores_BK


class FaultyWithWeights(Faulty):
    """Its batches are split over threads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))


MODELS = {"faulty": Faulty, "pixels": Pixels, "split": FaultyWithWeights}


def build(name: str, device: str) -> Classifier:
    """The server's factory. Loading hangs for as long as the file that the variable names is there."""
    while (stuck := os.environ.get(STUCK)) and Path(stuck).exists():
        time.sleep(0.05)
    rule = Preprocess(image_size=(SIDE, SIDE))
    return Classifier(Bundle(MODELS[name](), rule, ("a", "b"), "# A test\n", {}), device)


def main(limits: str, load_again_seconds: str = "") -> None:
    from vitlab.serving.admission import Visitors
    from vitlab.serving.app import make_app
    from vitlab.serving.listening import bound_socket, listen
    from vitlab.serving.service import Service
    from vitlab.serving.settings import Limits, ModelSettings, Source

    settings = ModelSettings(tuple(Source(name, name) for name in MODELS), "cpu", 1, "server_models:build")
    service = Service(settings, Limits(**json.loads(limits)))
    app, sock = make_app(service, Visitors(frozenset()), Console()), bound_socket("127.0.0.1", 0)

    def started() -> None:
        if load_again_seconds:  # the first time, Python and torch are loaded too
            service.process.load_seconds = float(load_again_seconds)
        print(f"Serving at http://127.0.0.1:{sock.getsockname()[1]}", file=sys.stderr, flush=True)

    asyncio.run(listen(app, service, sock, started))


if __name__ == "__main__":
    main(*sys.argv[1:])
