"""One attention layer in bfloat16 on a CPU, forward and backward: torch's kernels, and ours with another backward pass.

    python bench/cpu_attention.py [--write FILE]

CPU time of one thread, the least of many turns that alternate; errors are those of the gradient of q against float64.
"""

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.models.cpu_attention import HalfOnCpu

# batch, heads, tokens, width of a head: Ti/4 at 32 pixels, S/32, Ti/16, S/16, B/16 and L/14 at 224, B/16 at 384, So400m/14
# at 378, and the first length that is left to torch
SIZES = [
    *[(64, 3, 65, 64), (64, 6, 50, 64), (32, 3, 197, 64), (16, 6, 197, 64), (16, 12, 197, 64), (8, 16, 257, 64)],
    *[(2, 12, 577, 64), (2, 16, 729, 72), (2, 12, 768, 64)],
]
TURNS = 15
LARGE = 31 * 2**20  # bytes; a block as training has them, after which the allocator keeps memory that is given back
WAYS: dict[str, Callable[..., Tensor]] = {"torch": F.scaled_dot_product_attention, "vitlab": HalfOnCpu.apply}


def main() -> None:
    parser = argparse.ArgumentParser(description="One attention layer in bfloat16 on a CPU.")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.ones(LARGE, dtype=torch.uint8)
    lines = [
        "# Attention in bfloat16 on a CPU, forward and backward",
        "",
        f"{date.today()} · `python bench/cpu_attention.py` · one thread, {torch.backends.cpu.get_cpu_capability()}"
        f" · torch {torch.__version__} · CPU ms, the least of {TURNS} alternating turns",
        "",
        "The forward pass is the same kernel. Errors are of the gradient of q, relative to float64. One thread only: with more,"
        " and on CPUs with AMX, nothing was measured. Two things are left to torch. Sequences of 768 tokens and more, as the"
        " last row shows: torch takes larger tiles from there on. And CPUs without AVX512-BF16: with"
        " `ONEDNN_MAX_CPU_ISA=AVX2` before the command, ours took 1.3 to 1.7 times as long as torch's in the first five rows.",
        "",
        "| batch, heads, tokens, width | torch | vitlab | torch / vitlab | error, torch | error, vitlab |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        times, errors = measured(size)
        row = [f"{times[name] * 1e3:.1f}" for name in WAYS] + [f"{times['torch'] / times['vitlab']:.2f}"]
        lines.append(f"| {size} | " + " | ".join(row + [f"{errors[name]:.4f}" for name in WAYS]) + " |")
        print(lines[-1])
    if given.write:
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(size: tuple[int, int, int, int]) -> tuple[dict[str, float], dict[str, float]]:
    batch, heads, tokens, width = size
    torch.manual_seed(0)
    parts = [part.detach().requires_grad_() for part in _views(batch, tokens, heads, width)]
    dy = torch.randn(size, dtype=torch.bfloat16)
    wide = [part.detach().double().requires_grad_() for part in parts]
    true = torch.autograd.grad(F.scaled_dot_product_attention(*wide), wide, dy.double())[0]
    times, errors = dict.fromkeys(WAYS, float("inf")), dict.fromkeys(WAYS, 0.0)
    for _ in range(TURNS):
        for name, way in WAYS.items():
            began = time.process_time()
            found = torch.autograd.grad(way(*parts), parts, dy)[0]
            times[name] = min(times[name], time.process_time() - began)
            errors[name] = float((found.double() - true).norm() / true.norm())
    return times, errors


def _views(batch: int, tokens: int, heads: int, width: int) -> Tensor:
    return torch.randn(batch, tokens, 3, heads, width, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)


if __name__ == "__main__":
    main()
