"""One flipped bit anywhere in a checkpoint is noticed, and the one before is used.

One bit of each byte of a small checkpoint by default; with VITLAB_SOAK=1 every bit of one made from a real model.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from slow_cases import slow_after
from torch.nn import functional as F

from vitlab.core import fsio
from vitlab.core.errors import FileProblem
from vitlab.core.runtime import generator
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.training import checkpoint
from vitlab.training.checkpoint import Snapshot
from vitlab.training.optim import OptimRule, make_optimizer, optimizer_state

SOAK = os.environ.get("VITLAB_SOAK") == "1"
MOST = 64 * 1024  # bytes of the folder, all files together
SPEC = ViTSpec(
    width=4, depth=1, mlp_dim=4, heads=1, patch=4, image_size=(8, 8), in_channels=1, num_classes=4, registers=0
)


def small(step: int) -> Snapshot:
    draw = generator(step)
    return Snapshot(
        step=step,
        model={"w": torch.randn(3, 2, generator=draw), "b": torch.randn(2, generator=draw)},
        optimizer={"w/step": torch.tensor(float(step)), "w/exp_avg": torch.randn(3, 2, generator=draw).bfloat16()},
        ema={"w": torch.randn(3, 2, generator=draw)},
        progress={"best": None, "evaluations": [{"step": 1, "top1": 0.1 + 0.2}], "bad": {}, "scaler": {}},
    )


def real(step: int) -> Snapshot:
    """A small ViT after one update of AdamW, with its moving average."""
    model = build(SPEC, seed=step)
    optimizer = make_optimizer(model, OptimRule(lr=1e-3))
    images_BCYX = torch.randn(2, 1, 8, 8, generator=generator(step))
    F.cross_entropy(model(images_BCYX), torch.tensor([0, 1])).backward()
    before = checkpoint.copied(model.state_dict())
    optimizer.step()
    progress = {"best": None, "evaluations": [], "bad": {}, "scaler": {}}
    state = checkpoint.copied(optimizer_state(optimizer, model))
    return Snapshot(step, checkpoint.copied(model.state_dict()), state, before, progress)


def _is_the_one_of_its_byte(position: int) -> bool:
    return position % 8 == position // 8 % 8


TURNS = 8


def flips(path: Path, turn: int) -> Iterator[tuple[Path, int]]:
    """Damages one bit after the other, in every file, and mends it again; by default another one in each byte.

    Of the bytes of a file, those of one turn.
    """
    for file in sorted(path.iterdir()):
        with file.open("r+b", buffering=0) as held:
            for position in range(file.stat().st_size * 8):
                if position // 8 % TURNS != turn or not (SOAK or _is_the_one_of_its_byte(position)):
                    continue
                held.seek(position // 8)
                whole = held.read(1)
                for byte in (bytes([whole[0] ^ 1 << position % 8]), whole):
                    held.seek(position // 8)
                    held.write(byte)
                    if byte != whole:
                        yield file, position


@pytest.mark.parametrize("turn", slow_after(1, range(TURNS)))
def test_every_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path, turn: int) -> None:
    """Each bit by the check that every reading makes first, and one bit of each byte by going back to the one before."""
    made = real if SOAK else small
    first, second = (checkpoint.store(tmp_path, made(step)) for step in (1, 2))
    sizes = [file.stat().st_size for file in second.iterdir()]
    assert sum(sizes) <= MOST
    size = sum(len(range(turn, each, TURNS)) for each in sizes)
    noticed = fell_back = 0
    for file, position in flips(second, turn):
        with pytest.raises(FileProblem):
            fsio.verify_folder(second)
        noticed += 1
        if _is_the_one_of_its_byte(position):
            found, printed = checkpoint.newest_valid(tmp_path)
            assert found is not None and found.step == 1, (file.name, position)
            assert len(printed) == 1 and printed[0].startswith("step-000000002 cannot be used: "), (file.name, position)
            fell_back += 1
    assert (noticed, fell_back) == ((8 if SOAK else 1) * size, size), "each was tried"
    found, printed = checkpoint.newest_valid(tmp_path)
    assert found is not None and (found.step, printed) == (2, []), "mended, it counts again"
    assert fsio.verify_folder(first)
    print(f"{noticed:,} bits of {size:,} bytes flipped, one at a time: all noticed, {fell_back:,} times gone back")
