"""Forward and training speed of our models beside the peers', as ratios in one run on this machine.

Run by `make bench` in the peers' environment. Rounds are interleaved, so that a busy moment hits everybody; the best of the
rounds counts, because noise only ever slows down. `--write` records the table in docs/results/.
"""

import argparse
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

import vitlab

# PyPI's torchvision does not import beside a CPU build of torch unless these two operators are declared first.
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CASES = [("ViT-Ti/16", 8), ("ViT-S/16", 8), ("ViT-B/16", 8), ("R50+ViT-B/16", 4), ("BiT-R50x1", 8)]
TIMM = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
    "R50+ViT-B/16": "vit_base_r50_s16_224",
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


def best_rates(name: str, batch: int, job: Callable[[nn.Module, torch.Tensor], None], rounds: int) -> dict[str, float]:
    x = torch.randn(batch, 3, 224, 224)
    models = {peer: build().train(job is train_step) for peer, build in peers_of(name).items()}
    for model in models.values():
        job(model, x)
    best = dict.fromkeys(models, 0.0)
    for _ in range(rounds):
        for peer, model in models.items():
            started = time.perf_counter()
            job(model, x)
            best[peer] = max(best[peer], batch / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="record the table in docs/results/")
    arguments = parser.parse_args()
    rows = [
        "| model | job | batch | vitlab img/s | timm img/s | transformers img/s | vitlab / best peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, batch in CASES:
        for job in (forward, train_step):
            rates = best_rates(name, batch, job, arguments.rounds)
            ratio = rates["vitlab"] / max(rate for peer, rate in rates.items() if peer != "vitlab")
            cells = [f"{rates[peer]:.1f}" if peer in rates else "" for peer in ("vitlab", "timm", "transformers")]
            rows.append(f"| {name} | {job.__name__} | {batch} | {' | '.join(cells)} | {ratio:.2f} |")
            print(rows[-1], flush=True)
    if arguments.write:
        import timm
        import transformers

        text = f"""# Speed of the models beside their peers (CPU, fp32)

{date.today()}, `make bench`, best of {arguments.rounds} interleaved rounds, {torch.get_num_threads()} threads on {platform.machine()}
({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}.

{chr(10).join(rows)}
"""
        folder = Path(__file__).parent.parent / "docs" / "results"
        folder.mkdir(exist_ok=True)
        (folder / "model-speed-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
