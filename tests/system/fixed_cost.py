"""A model of fixed cost for tests of the server: a batch takes a set time, and each answer is a number drawn in its picture.

The server imports it in the process of the model (`fixed_cost:build`). Two answers that were swapped cannot stay unseen, and
what a batch costs does not depend on how busy the machine is.
"""

import io
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.rules import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.models.model import Model
from vitlab.models.names import parse_name, with_size
from vitlab.weights.bundle import Bundle

SIDE, BITS = 32, 10  # a number is ten squares of a 4x4 board, white for 1
NUMBERS = 2**BITS
# In the folder that stands for the model: what a batch costs, read; which process has it, written.
COST, PID = "seconds.txt", "pid.txt"


class FixedCost(Model):
    """Sleeps, then reads the numbers off the pictures."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.spec = with_size(parse_name("ViT-Ti/16"), num_classes=NUMBERS, image_size=(SIDE, SIDE))
        self.head, self.seconds = None, seconds

    def forward(self, x_BCYX: Tensor, tape: object = None) -> Tensor:  # noqa: ARG002
        numbers_B = self.represent(x_BCYX)[:, 0].long()
        # Another height of the peak for every number, so that probabilities tell answers apart too.
        return torch.nn.functional.one_hot(numbers_B, NUMBERS) * (5 + 5 * numbers_B[:, None] / NUMBERS)

    def represent(self, x_BCYX: Tensor, tape: object = None) -> Tensor:  # noqa: ARG002
        time.sleep(self.seconds)
        centres_Bb = x_BCYX[:, 0, SIDE // 8 :: SIDE // 4, SIDE // 8 :: SIDE // 4].flatten(1)[:, :BITS]
        numbers_B1 = ((centres_Bb > 0) * 2 ** torch.arange(BITS)).sum(dim=1, keepdim=True).float()
        return torch.cat([numbers_B1, numbers_B1.sqrt()], dim=1)


def build(path: str, device: str) -> Classifier:
    """The server's factory: `path` is a folder with the cost of a batch."""
    folder = Path(path)
    (folder / PID).write_text(str(os.getpid()))
    return classifier(float((folder / COST).read_text()), device)


def classifier(seconds: float = 0.0, device: str = "cpu") -> Classifier:
    rule = Preprocess(image_size=(SIDE, SIDE), resize="squash", crop_frac=1.0)
    labels = tuple(f"number {number}" for number in range(NUMBERS))
    return Classifier(Bundle(FixedCost(seconds), rule, labels, "# Reads numbers\n", {}), device)


def picture(number: int) -> bytes:
    """The number as a PNG."""
    board = np.zeros(16, np.uint8)
    board[:BITS] = [255 * (number >> bit & 1) for bit in range(BITS)]
    pixels = board.reshape(4, 4).repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(file, "PNG")
    return file.getvalue()
