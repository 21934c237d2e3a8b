"""In which numbers the model computes. The one place that turns autocast on: models never ask, and weights stay in float32.

    scaler = grad_scaler("fp16", device)
    with autocast("fp16", device):
        logits = model(images)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # before clipping, or the limit would apply to the scaled gradient
    scaler.step(optimizer)
    scaler.update()

float16 reaches 6e-8 at the small end and gradients go below it, so the loss is scaled up; bfloat16 has float32's range and
needs nothing. With "fp32" and "bf16" the scaler is there too, switched off, so that one loop serves all three.
"""

import torch

from vitlab.core.errors import UsageError
from vitlab.training.rules import Precision

NARROW: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """A context for the forward pass. Norms, softmax and losses stay in float32, as torch's list of operations has it."""
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError(f"the GPU {device} has no bfloat16", hint="Use precision fp16 or fp32.")
    narrow = NARROW[precision]
    return torch.autocast(device.type, dtype=narrow, enabled=narrow is not None)


def grad_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss up and the gradients down again; does nothing unless the precision is fp16."""
    return torch.amp.GradScaler(device.type, enabled=NARROW[precision] == torch.float16)
