"""What all pretext tasks share: an encoder, parameters of the task's own, and one loss per image.

A task is a module from images to losses [B], so that the loop, several processes, precision and accumulation treat it like a
model. Its noise comes from torch's generator, which every step seeds.
Letters: B batch, C channels, Y X rows and columns, N patches, M hidden ones, O numbers of a patch (P·P·C), P patch side.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.core.runtime import mix
from vitlab.models import init
from vitlab.models.init import initialise
from vitlab.models.spec import Pair
from vitlab.models.vit import ViT

ENCODER = "encoder."  # before the names of the encoder's tensors; all others are the task's, and go when it is done
TOKEN_STD = 0.02  # of a mask vector at its start, as of positions
_INIT_STREAM = 11  # keeps the numbers that the task starts with apart from other uses of the same seed


class Pretext(nn.Module):
    """Normalised images [B, C, Y, X] -> the loss of each [B], in float32. `encoder` is what the run is for."""

    recompute_units = ViT.recompute_units
    sharding_units = ViT.sharding_units
    half_precision_units = ViT.half_precision_units

    def __init__(self, encoder: ViT) -> None:
        super().__init__()
        self.encoder = encoder

    def start(self, seed: int) -> None:
        """Fill the task's own parameters; the encoder has its weights already."""
        generator = torch.Generator().manual_seed(mix(seed, _INIT_STREAM))
        for name, module in self.named_children():
            if module is not self.encoder:
                assert not name.startswith(ENCODER)
                initialise(module, generator)
        self.init_tokens(generator)

    @torch.no_grad()
    def init_tokens(self, generator: Generator) -> None:
        """Fill parameters that are in no module of the task's own."""

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters beside the encoder's."""
        return ((name, value) for name, value in self.named_parameters() if not name.startswith(ENCODER))

    def forward(self, x_BCYX: Tensor) -> Tensor:
        raise NotImplementedError

    def paint(self, x_BCYX: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """The images with what was hidden in grey, and with the prediction in its place; None for a task that hides nothing."""
        return None


class TaskLinear(nn.Linear):
    """A linear layer of the task, which starts as those of the encoder do."""

    def init_weights(self, generator: Generator | None) -> None:
        init.dense(self, generator)


class Projection(nn.Module):
    """To another width: one linear layer or, with `hidden`, two with a GELU between."""

    def __init__(self, width: int, out: int, *, hidden: bool) -> None:
        super().__init__()
        self.first = TaskLinear(width, out) if hidden else None
        self.last = TaskLinear(out if hidden else width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x if self.first is None else F.gelu(self.first(x)))


def patch_pixels(x_BCYX: Tensor, patch: int) -> Tensor:
    """The pixels of every patch by row, column and channel, [B, N, P·P·C], patches in the order of the embedding's."""
    batch, channels, rows, cols = x_BCYX.shape
    cut = x_BCYX.reshape(batch, channels, rows // patch, patch, cols // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def from_patches(pixels_BNO: Tensor, patch: int, grid: Pair) -> Tensor:
    """The inverse of `patch_pixels`, [B, C, Y, X]."""
    rows, cols = grid
    cut = pixels_BNO.reshape(len(pixels_BNO), rows, cols, patch, patch, -1)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(len(pixels_BNO), -1, rows * patch, cols * patch)


def hide_and_paint(
    x_BCYX: Tensor, predicted_BMO: Tensor, index_BM: Tensor, patch: int, grid: Pair
) -> tuple[Tensor, Tensor]:
    """Images with zeros for the patches of `index_BM`, and images with the predicted pixels there."""
    pixels_BNO = patch_pixels(x_BCYX, patch)
    index_BMO = index_BM[:, :, None].expand(-1, -1, pixels_BNO.shape[2])
    hidden = pixels_BNO.scatter(1, index_BMO, torch.zeros_like(index_BMO, dtype=pixels_BNO.dtype))
    painted = pixels_BNO.scatter(1, index_BMO, predicted_BMO.to(pixels_BNO.dtype))
    return from_patches(hidden, patch, grid), from_patches(painted, patch, grid)


def encoder_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors of a task's state, by the names that the encoder has for them."""
    return {name.removeprefix(ENCODER): value for name, value in state.items() if name.startswith(ENCODER)}
