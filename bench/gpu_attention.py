"""One attention layer in bfloat16 on a GPU, forward and backward, deterministic and compiled: torch's kernel, and the formula.

    python bench/gpu_attention.py [--write FILE]

Milliseconds of the GPU, the least of many turns that alternate; errors are those of the gradient of qkv against float64.
"""

import argparse
import functools
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# batch, heads, tokens, width of a head: the plain ViT of CIFAR-10, Ti/4 at 32 pixels, S/32, S/16, B/16 and L/14 at 224
SIZES = [(768, 4, 64, 64), (512, 3, 65, 64), (256, 6, 50, 64), (256, 6, 197, 64), (64, 12, 197, 64), (32, 16, 257, 64)]
TURNS, TOGETHER = 10, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the latter to try the program alone


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    return logits.float().softmax(dim=-1).to(v.dtype) @ v


WAYS: dict[str, tuple[Callable[..., Tensor], SDPBackend]] = {
    "flash": (fused, SDPBackend.FLASH_ATTENTION),
    "formula": (formula, SDPBackend.FLASH_ATTENTION),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One attention layer in bfloat16 on a GPU.")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    lines = [
        "# Attention in bfloat16 on a GPU, forward and backward",
        "",
        f"{date.today()} · `python bench/gpu_attention.py` · {where} · torch {torch.__version__} · deterministic and compiled"
        f" · ms, the least of {TURNS} alternating turns of {TOGETHER}; in brackets the error of the gradient",
        "",
        f"| batch, heads, tokens, width | {' | '.join(WAYS)} |",
        "|---|" + "---|" * len(WAYS),
    ]
    for size in SIZES if DEVICE == "cuda" else [(2, *size[1:]) for size in SIZES[:1]]:
        cells = [f"{ms:.3f} ({error:.4f})" for ms, error in measured(*size).values()]
        lines.append(f"| {size} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.write:
        given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(batch: int, heads: int, tokens: int, width: int) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * heads * width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    dy = torch.randn(batch, tokens, heads * width, dtype=torch.bfloat16, device=DEVICE)

    def layer(way: Callable[..., Tensor], x: Tensor) -> Tensor:
        q, k, v = x.view(len(x), tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
        return way(q, k, v).transpose(1, 2).flatten(2)

    few = qkv[:2].detach().double().requires_grad_()
    (true,) = torch.autograd.grad(layer(formula, few), few, dy[:2].double())
    found: dict[str, tuple[float, float]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, (way, backend) in WAYS.items():
        whole = torch.compile(functools.partial(layer, way), disable=DEVICE == "cpu")

        def run(whole: Callable[[Tensor], Tensor] = whole, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend, SDPBackend.MATH] if DEVICE == "cpu" else backend):
                return torch.autograd.grad(whole(qkv), qkv, dy)[0]

        error = (run()[:2].double() - true).norm() / true.norm()
        found[name] = (float("inf"), float(error))
        if DEVICE == "cuda":
            graphs[name] = _recorded(run)
    for _ in range(TURNS):
        for name, graph in graphs.items():
            found[name] = min(found[name][0], _milliseconds(graph)), found[name][1]
    return found


def _recorded(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Many turns as one graph: else the time would be that of the launches, which is the same for all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TOGETHER):
            run()
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / TOGETHER


if __name__ == "__main__":
    main()
