"""EfficientNets beside timm's and torchvision's: counts to the unit, logits of real files in both directions."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from parity import difference
from peers import timm
from torch import Tensor, nn

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import Model, allocate, build
from vitlab.models.cost import count_params, count_stored
from vitlab.models.efficientnet_spec import SCALINGS, EfficientNetSpec
from vitlab.models.names import parse_name, with_size
from vitlab.weights.bundle import Bundle
from vitlab.weights.foreign import read_foreign
from vitlab.weights.targets import write_foreign

vision = pytest.importorskip("torchvision.models.efficientnet")

TOLERANCE = 1e-4  # of logits about 1, in float32, through fifty batch norms
SIZES = (64, 97)  # of images: what SAME pads differs between even and odd sides


def spec_of(size: str, **changes: Any) -> EfficientNetSpec:
    spec = with_size(parse_name(f"EfficientNet-{size}"), num_classes=7)
    assert isinstance(spec, EfficientNetSpec)
    return dataclasses.replace(spec, **changes)


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """The model's own initial values with noise, and running statistics as those of a trained one: neither 0 nor 1."""
    torch.manual_seed(0)
    for name, value in model.state_dict().items():
        if name.endswith("running_mean"):
            value += 0.1 * torch.randn(value.shape)
        elif name.endswith("running_var"):
            value *= torch.rand(value.shape) + 0.5
        elif name.endswith("num_batches_tracked"):
            value += 12
        else:
            value += 0.02 * torch.randn(value.shape)
    return model.eval()


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side + 9, generator=torch.Generator().manual_seed(1))


def hold_alike(one: nn.Module, other: nn.Module) -> None:
    for side in SIZES:
        x = images(side)
        with torch.inference_mode():
            expected, found = one(x), other(x)
        assert expected.std() > 0.01, "logits that differ between images and classes"
        assert difference(found, expected) <= TOLERANCE, side


def ours(spec: EfficientNetSpec) -> Model:
    model = shaken(build(spec, seed=0))
    assert isinstance(model, Model)
    return model


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SCALINGS)
def test_sizes_are_timms_to_the_unit(size: str) -> None:
    spec = parse_name(f"EfficientNet-{size}")
    with torch.device("meta"):
        peer = timm.create_model(f"tf_efficientnet_{size.lower()}")
    assert sum(parameter.numel() for parameter in peer.parameters()) == count_params(spec)
    assert sum(tensor.numel() for tensor in peer.state_dict().values()) == count_stored(spec)
    shapes = sorted(tuple(tensor.shape) for tensor in peer.state_dict().values())
    assert shapes == sorted(tuple(tensor.shape) for tensor in allocate(spec).state_dict().values())


@pytest.mark.parametrize("size", [size for size in SCALINGS if size != "L2"])
def test_sizes_are_torchvisions_to_the_unit(size: str) -> None:
    with torch.device("meta"):
        peer = getattr(vision, f"efficientnet_{size.lower()}")()
    spec = parse_name(f"EfficientNet-{size}")
    assert sum(tensor.numel() for tensor in peer.state_dict().values()) == count_stored(spec)
    norm = peer.features[0][1]
    assert isinstance(spec, EfficientNetSpec)
    read = _through_names(peer.state_dict(), spec)
    assert (read.bn_eps, read.bn_momentum, read.padding) == (norm.eps, norm.momentum, "fixed")
    assert (read.dropout, read.stochastic_depth) == (peer.classifier[0].p, 0.2)


def _through_names(state: dict[str, Tensor], spec: EfficientNetSpec) -> EfficientNetSpec:
    from vitlab.weights.formats.table import find_format

    found = find_format("torchvision", spec).read_spec(state, "peer", {}, None)
    assert isinstance(found, EfficientNetSpec)
    return found


# --- logits -----------------------------------------------------------------------------------------------------------

PEERS: dict[str, Callable[[], nn.Module]] = {
    "tf_efficientnet_b0": lambda: timm.create_model("tf_efficientnet_b0", num_classes=7),
    "efficientnet_b0": lambda: timm.create_model("efficientnet_b0", num_classes=7),
    "torchvision B0": lambda: vision.efficientnet_b0(num_classes=7),
    # Wider and deeper than B0, so that rounded widths and depths count too.
    "tf_efficientnet_b3": lambda: timm.create_model("tf_efficientnet_b3", num_classes=7),
    "torchvision B3": lambda: vision.efficientnet_b3(num_classes=7),
}


@pytest.mark.parametrize("name", PEERS)
def test_their_weights_read_here_give_their_logits(name: str, tmp_path: Path) -> None:
    peer = shaken(PEERS[name]())
    safetensors.torch.save_file(peer.state_dict(), tmp_path / "model.safetensors")
    if "torchvision" not in name:
        (tmp_path / "config.json").write_text(f'{{"architecture": "{name}"}}')
    bundle, report = read_foreign(tmp_path)
    same = name.startswith("tf_")
    assert bundle.model.spec == spec_of(
        name[-2:].upper(), padding="same" if same else "fixed", bn_eps=1e-3 if same else 1e-5, bn_momentum=0.1
    )
    assert not any("assumed: padding" in note for note in report.notes)
    hold_alike(peer, bundle.model)


@pytest.mark.parametrize(
    "changes",
    [{}, {"padding": "fixed", "bn_eps": 1e-5, "bn_momentum": 0.1}, {"bn_eps": 1e-4}, {"padding": "fixed"}],
    ids=str,
)
def test_our_weights_open_in_timm_from_the_folder_that_was_written(changes: dict[str, Any], tmp_path: Path) -> None:
    model = ours(spec_of("B0", **changes))
    labels = tuple("abcdefg")
    write_foreign(Bundle(model, Preprocess(image_size=(224, 224)), labels, "# B0", {}), tmp_path / "timm", "timm")
    peer = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    hold_alike(model, peer)
    assert peer.bn1.momentum == pytest.approx(model.spec.bn_momentum)  # pyright: ignore[reportAttributeAccessIssue]
    counts = [value for name, value in peer.state_dict().items() if name.endswith("num_batches_tracked")]
    assert {int(count) for count in counts} == {12}
    back, _ = read_foreign(tmp_path / "timm")
    assert back.model.spec == model.spec and back.labels == labels
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.model.state_dict().items())


def test_our_weights_open_in_torchvision_and_come_back(tmp_path: Path) -> None:
    model = ours(spec_of("B0", padding="fixed", bn_eps=1e-5, bn_momentum=0.1))
    bundle = Bundle(model, Preprocess(image_size=(224, 224)), tuple("abcdefg"), "# B0", {})
    write_foreign(bundle, tmp_path / "x.safetensors", "torchvision")
    peer = vision.efficientnet_b0(num_classes=7)
    peer.load_state_dict(safetensors.torch.load_file(tmp_path / "x.safetensors"))
    hold_alike(model, peer.eval())
    torch.save(peer.state_dict(), tmp_path / "peer.pth")
    back, _ = read_foreign(tmp_path / "peer.pth")
    assert back.model.spec == model.spec
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.model.state_dict().items())


def test_a_step_in_training_mode_moves_the_statistics_as_timms_does() -> None:
    """Batch statistics, momentum and the unbiased variance; stochastic depth and dropout off."""
    spec = spec_of("B0", bn_momentum=0.1, dropout=0.0, stochastic_depth=0.0)
    model, peer = ours(spec), timm.create_model("tf_efficientnet_b0", num_classes=7)
    from vitlab.weights.formats.table import find_format
    from vitlab.weights.rules import link, send_out

    chosen = find_format("timm", spec)
    links = link(chosen.rules(spec, chosen.dialect()), spec, "timm")
    peer.load_state_dict(send_out(links, model.state_dict()))
    x = images(64)
    found, expected = model.train()(x), peer.train()(x)
    assert difference(found.detach(), expected.detach()) <= TOLERANCE
    moved = send_out(links, model.state_dict())
    for name, value in peer.state_dict().items():
        torch.testing.assert_close(moved[name], value, rtol=1e-4, atol=1e-5, msg=name)
