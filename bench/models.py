"""Forward and training speed of our models beside the peers', as ratios in one run on this machine.

Run by `make bench` in the peers' environment. Rounds are interleaved, so that a busy moment hits everybody; the best of the
rounds counts, because noise only ever slows down. `--write FILE` records the table.
"""

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

import vitlab

Job = Callable[[nn.Module, torch.Tensor], None]

# PyPI's torchvision does not import beside a CPU build of torch unless these two operators are declared first.
try:
    import torchvision  # noqa: F401
except RuntimeError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

BATCHES = {
    "cpu": {"ViT-Ti/16": 8, "ViT-S/16": 8, "ViT-B/16": 8, "R50+ViT-B/16": 4, "BiT-R50x1": 8},
    "cuda": dict.fromkeys(("ViT-Ti/16", "ViT-S/16", "ViT-B/16", "ViT-L/16", "R50+ViT-B/16", "BiT-R50x1"), 128),
}
TIMM = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
    "R50+ViT-B/16": "vit_base_r50_s16_224",
    "ViT-L/16": "vit_large_patch16_224",
    "BiT-R50x1": "resnetv2_50x1_bit",
}


def peers_of(name: str) -> dict[str, Callable[[], nn.Module]]:
    """Builders, by peer, of the same architecture with random weights."""
    import timm
    import transformers

    found: dict[str, Callable[[], nn.Module]] = {
        "vitlab": lambda: vitlab.create_model(name, seed=0),
        "timm": lambda: timm.create_model(TIMM[name], num_classes=1000),
    }
    spec = vitlab.model_info(name).spec
    if name.startswith("ViT"):
        shape = {
            "hidden_size": spec.width,
            "num_hidden_layers": spec.depth,
            "num_attention_heads": spec.heads,
            "intermediate_size": spec.mlp_dim,
        }
        config = transformers.ViTConfig(**shape, num_labels=1000)
        found["transformers"] = lambda: transformers.ViTForImageClassification(config)
    return found


def forward(model: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        model(x)


def train_step(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def best_rates(name: str, x: torch.Tensor, job: Job, rounds: int) -> dict[str, float]:
    """Images per second of each peer, the best of `rounds`."""
    models = {peer: build().to(x).train(job is train_step) for peer, build in peers_of(name).items()}
    best = dict.fromkeys(models, 0.0)
    for round_ in range(rounds + 2):
        for peer, model in models.items():
            _wait(x)
            started = time.perf_counter()
            job(model, x)
            _wait(x)
            if round_ >= 2:  # the first two only warm up
                best[peer] = max(best[peer], len(x) / (time.perf_counter() - started))
    return best


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def table(device: str, dtype: torch.dtype, rounds: int) -> list[str]:
    peers = ("vitlab", "timm", "transformers")
    rows = ["| model | job | batch | vitlab img/s | timm img/s | transformers img/s | vitlab / best peer |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, batch in BATCHES[device].items():
        for job in (forward, train_step):
            rates = best_rates(name, torch.randn(batch, 3, 224, 224, device=device, dtype=dtype), job, rounds)
            ratio = rates["vitlab"] / max(rate for peer, rate in rates.items() if peer != "vitlab")
            cells = [f"{rates[peer]:.1f}" if peer in rates else "" for peer in peers]
            rows.append(f"| {name} | {job.__name__} | {batch} | {' | '.join(cells)} | {ratio:.2f} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=list(BATCHES), default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--write", type=Path, help="record the table in this file")
    arguments = parser.parse_args()
    rows = table(arguments.device, getattr(torch, arguments.dtype), arguments.rounds)
    if arguments.write:
        import timm
        import transformers

        machine = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        if arguments.device == "cuda":
            machine = torch.cuda.get_device_name()
        versions = f"torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}"
        command = f"python bench/models.py --device {arguments.device} --dtype {arguments.dtype}"
        arguments.write.parent.mkdir(exist_ok=True)
        arguments.write.write_text(
            f"# Speed of the models beside their peers ({arguments.device}, {arguments.dtype})\n\n"
            f"{date.today()} · `{command}` · best of {arguments.rounds} interleaved rounds · {machine} · {versions}.\n"
            "A training step here is forward and backward, without the optimiser.\n\n" + "\n".join(rows) + "\n"
        )


if __name__ == "__main__":
    main()
