"""Weights spread over processes (FSDP2): each keeps some rows of every tensor, and gathers a layer when it is needed.

Owns all that is to be known of torch's spread tensors; to others they are "the rows of this process", which are plain tensors.
The model's code and the names of its weights stay what they are.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.models.model import Model
from vitlab.training.precision import NARROW, Precision
from vitlab.training.pretext.task import Pretext

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(model: Model | Pretext, world: World, precision: Precision) -> None:
    """Spreads the weights over all processes, in place, moving them to their device one layer at a time.

    Large matrices travel in the numbers that autocast would make of them anyway, so that nothing of full size is kept; norms,
    tokens and positions stay in float32, and so does the sum of the gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh  # most of a second, for those alone who need it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Torch warns of outputs that are views, for the sake of code that changes them in place. Ours does not.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh(world.device.type, (world.size,))
    plain = narrow = MixedPrecisionPolicy(cast_forward_inputs=False)
    if (dtype := NARROW[precision]) is not None:
        narrow = dataclasses.replace(plain, param_dtype=dtype, reduce_dtype=torch.float32)
    for module in list(model.modules()):
        if isinstance(module, model.sharding_units):
            policy = narrow if isinstance(module, model.half_precision_units) else plain
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    # Also the rest is given back after each pass: what is gathered would not notice that its rows have changed.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=plain)


def to_local(tensor: Tensor) -> Tensor:
    """The rows of this process, in place; all of them where the tensor is not sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows, from all processes: everyone must ask."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is torch's `DTensor`, without importing that."""
    return hasattr(tensor, "full_tensor")


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state on the CPU, gathered one tensor at a time: everyone must ask."""
    return {name: full_tensor(value.detach()).cpu() for name, value in model.state_dict().items()}


@torch.no_grad()
def load_rows(state: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Copies the rows of this process into the tensors of `state`, by name."""
    for name in [*state, *rows]:
        if name not in state or name not in rows or to_local(state[name]).shape != rows[name].shape:
            raise UsageError(f"the checkpoint is not one of this model: '{name}' does not fit")
    for name, value in rows.items():
        to_local(state[name]).copy_(value)
