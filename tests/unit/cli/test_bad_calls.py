"""A wrong call is reported on standard error in a few lines, exits with status 2, and begins nothing."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

Call = Callable[..., Any]

# Short, should a wrong call be let through after all.
TINY = [
    *("--quiet", "--threads", "1"),
    *("--set", "pretrain.train.steps=1", "--set", "transfer.train.steps=1"),
    *("--set", "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"),
]


@pytest.fixture(autouse=True)
def torch_settings() -> Generator[None]:
    """Puts back what a started demo would change for the whole process."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def demo(*arguments: str) -> list[str]:
    return ["demo", *TINY, *arguments]


def info(*arguments: str) -> list[str]:
    return ["models", "info", *arguments]


BAD = [
    (info("ViT-X/16"), "Nearest: ViT-S/16, ViT-M/16, ViT-B/16."),
    (info("vit-b16"), "Nearest: ViT-B/16"),
    (info("resnet50"), "See `vitlab models list`"),
    (info("R50+ViT-B/14"), "total stride, 16 or 32"),
    (info("ViT-B/0"), "patch of 0 pixels"),
    (info("ViT-w10d1m1h3/16"), "width 10 is not divisible by 3 heads"),
    (info("BiT-R50x0"), "width_factor must be positive"),
    (info("ViT-B/16", "--image-size", "225"), "the 225x225 image\nNearest image size that works: 224,224."),
    (info("ViT-B/16", "--image-size=-5"), "image_size must be positive"),
    (info("ViT-B/16", "--image-size=0"), "image_size must be positive"),
    (info("ViT-B/16", "--image-size=224,-1"), "image_size must be positive"),
    (info("ViT-B/16", "--image-size=big"), "'big' is not an image size"),
    (info("ViT-B/16", "--image-size=1,2,3"), "is not an image size"),
    (info("ViT-B/16", "--classes=-1"), "num_classes must not be negative"),
    (info("ViT-B/16", "--classes=many"), "invalid value for '--classes'"),
    (info("ViT-B/16", "--classes"), "requires an argument"),
    (info("ViT-B/16", "--nope"), "no such option: --nope"),
    (info("ViT-B/16", "ViT-L/16"), "too many arguments"),
    (info(), "missing argument"),
    (["models", "list", "nothing*"], "unknown model pattern 'nothing*'"),
    (["models", "lst"], "no such command 'lst'"),
    (["trian"], "no such command 'trian'"),
    (demo("--set", "pretrain.model.heads=7"), "width 64 is not divisible by 7 heads"),
    (demo("--set", "transfer.optim.lrr=1"), "unknown config key 'optim.lrr'\nNearest: optim.lr"),
    (demo("--set", "optim.lr=1"), "unknown demo part 'optim'"),
    (demo("--set", "steps=1"), "unknown demo part 'steps'"),
    (["recipes", "show", "mine"], "unknown recipe 'mine'"),
    (demo("--set", "transfer.optim.lr"), "is not an override"),
    (demo("--set", "transfer.optim.lr=fast"), "'optim.lr' must be a number, not 'fast'"),
    (demo("--set", "transfer.train.steps=-2"), "train.steps must be positive"),
    (demo("--set", "transfer.schedule.decay=cosin"), "Allowed: cosine, linear, staircase"),
    (demo("--set"), "requires an argument"),
    (demo("--device", "gpu"), "'gpu' is not a device\nAvailable here: "),
    (demo("--threads", "0"), "--threads must be at least 1"),
    (demo("--seed", "x"), "invalid value for '--seed'"),
    (demo("--out", "file/below"), "file/below cannot be made: "),
    (demo("--out", "file"), "file exists already"),
    (demo("--dry-run", "--out", "file"), "file exists already"),
    (demo("--print-config", "--set", "pretrain.x=1"), "unknown config key 'x'"),
    (["doctor", "now"], "too many arguments"),
    (demo("--seed", str(2**64)), "seed"),
    (demo("--out", "n" * 300), "name too long"),
    (demo("--set", "pretrain.data.image_size=[-8,8]"), "image_size"),
    (demo("--set", "transfer.data.image_size=[15,16]"), "patch 2 does not divide the 15x16 image"),
    (demo("--set", "pretrain.optim.betas=[2,3]"), "betas must lie in 0 to 1"),
    (demo("--set", "pretrain.optim.lr=nan"), "lr must be positive"),
    (demo("--set", f"pretrain.optim.lr={'[' * 5000}"), "optim.lr"),
    (demo("--set", f"pretrain.optim.lr={'1' * 400}"), "optim.lr"),
    (demo("--set", "transfer.data.count=3"), "data.count"),
    (demo("--set", "transfer.data.test_frac=0"), "transfer has nothing to test on"),
    (demo("--set", "pretrain.data.source=fractal:categories=4"), "fractal"),
    (demo("--from-scratch"), "no such option: --from-scratch"),
    (["predict", "--model", "b", "photos"], "no such option: --model. Did you mean MODEL, without a flag?"),
    (["predict", "b", "--source", "photos"], "no such option: --source. Did you mean IMAGES, without a flag?"),
    (["embed", "--weights", "b", "photos"], "no such option: --weights. Did you mean MODEL, without a flag?"),
    (["evaluate", "--checkpoint", "b"], "no such option: --checkpoint. Did you mean MODEL, without a flag?"),
    (["evaluate", "b", "--data", "photos"], "no such option: --data. Did you mean DATA, without a flag?"),
    (["train", "digits", "--weights", "b"], "no such option: --weights. Did you mean --init?"),
    (["train", "digits", "--model", "dinov2"], "dinov2 is a checkpoint, not a model\nStart from it with --init dinov2."),
    (info("ViT-B/" + "1" * 5000), "ViT-B/1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "printed"), BAD, ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else ""
)
def test_wrong_call_is_refused_before_any_work(call: Call, tmp_path: Path, arguments: list[str], printed: str) -> None:
    (tmp_path / "file").write_text("mine")
    code, out, err = call(*arguments)
    assert code == 2
    assert out == ""
    assert printed in err
    assert "Traceback" not in err
    assert "unexpected" not in err.splitlines()[0]
    assert len(err.splitlines()) <= 5
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (demo("--set", f"transfer.optim.max_grad_norm={'1' * 400}"), "optim.max_grad_norm"),
        pytest.param(
            ["demo", "--quiet", "--set", f"transfer.train.steps={'1' * 400}"],
            "train.steps",
        ),
        (info("ViT-B/16", f"--image-size={'1' * 400}"), "1111"),
    ],
    ids=["norm", "steps", "image"],
)
def test_wrong_call_with_absurd_or_idle_values_is_refused(
    call: Call, tmp_path: Path, arguments: list[str], printed: str
) -> None:
    test_wrong_call_is_refused_before_any_work(call, tmp_path, arguments, printed)


@pytest.mark.parametrize("name", ["ViT-w20000000d1m1h2/16", "ViT-w20000001d1m1h2/16"])
def test_absurd_size_is_answered_at_once(call: Call, least_seconds: Callable[..., float], name: str) -> None:
    assert call("models", "info", name).code in (0, 2)
    assert least_seconds(call, "models", "info", name) < 0.25


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_that_is_not_there_is_reported(call: Call, tmp_path: Path) -> None:
    code, out, err = call(*demo("--device", "cuda"))
    assert (code, out) == (2, "")
    assert err == "vitlab: device 'cuda' is not available\nAvailable here: cpu.\n"
    assert list(tmp_path.iterdir()) == []


def test_no_arguments_show_the_help(call: Call) -> None:
    code, out, err = call()
    assert code == 2
    assert "Usage: " in out + err
