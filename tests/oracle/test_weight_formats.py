"""The peers' own state dicts and folders: read, they give the peers' logits; written, the peers open them without a remark."""

import ast
import dataclasses
import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from parity import TOLERANCE, difference, fill, images
from peers import timm, transformers
from PIL import Image
from torch import Tensor, nn

from vitlab.core.errors import FileProblem
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.models.build import Model, allocate
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import BiTSpec, ModelSpec, Pair, TrunkSpec, ViTSpec
from vitlab.weights.bundle import Bundle, load_state
from vitlab.weights.foreign import ConvertReport, read_foreign
from vitlab.weights.formats import bit_torch, dinov2, hf, hf_settings, timm_keys, timm_settings, torchvision_keys
from vitlab.weights.formats.format import Format, NoDialect
from vitlab.weights.formats.hf import HFDialect
from vitlab.weights.formats.table import find_format
from vitlab.weights.formats.timm_keys import TimmDialect
from vitlab.weights.formats.torchvision_keys import TorchvisionDialect
from vitlab.weights.rules import Rule, bring_in, link, send_out
from vitlab.weights.targets import Target, write_foreign

torchvision_models = pytest.importorskip("torchvision.models.vision_transformer")

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[3] / "shared" / "data"))
State = dict[str, Tensor]
Call = Callable[[nn.Module, Tensor], Tensor]
changed: Callable[..., Any] = dataclasses.replace


@dataclasses.dataclass(frozen=True)
class Peer:
    """A model that exists on both sides. `call` gets images of the model's own size, or of another when it can."""

    name: str
    spec: ModelSpec
    dialect: Any
    build: Callable[[Any], nn.Module]
    call: Call
    config: Mapping[str, Any] | None = None
    other: Pair | None = None

    @property
    def format(self) -> Format[Any, Any]:
        return find_format(self.name, self.spec)


def rules_of(peer: Peer, spec: ModelSpec, dialect: Any) -> list[Rule]:
    return peer.format.rules(spec, dialect)


def timm_args(spec: ModelSpec) -> dict[str, Any]:
    entry = bit_torch.timm_entry(spec) if isinstance(spec, BiTSpec) else timm_keys.entry_of(spec)
    assert entry.args is not None
    return entry.args


def ours_from(peer: Peer, arrays: State, config: Mapping[str, Any] | None) -> Model:
    """vitlab's model, from what the peer holds and nothing else."""
    dialect, drop = peer.format.read_dialect(arrays), peer.format.leftovers(arrays)
    spec = peer.format.read_spec(arrays, "peer", config or {}, None)
    kept = {name: array for name, array in arrays.items() if name not in drop}
    state = bring_in(link(rules_of(peer, spec, dialect), spec, "peer"), kept, spec, "peer")
    return load_state(allocate(spec), {name: tensor.clone() for name, tensor in state.items()}, "peer").eval()


def ours_new(spec: ModelSpec) -> Model:
    model = allocate(spec).to_empty(device="cpu")
    fill(model)
    return model.eval()


def theirs_from(peer: Peer, model: Model) -> State:
    return send_out(link(rules_of(peer, model.spec, peer.dialect), model.spec, "peer"), model.state_dict())


@torch.no_grad()
def shaken(peer: Peer) -> nn.Module:
    """The peer's own initial values, and a little noise everywhere: much of what it starts from is zero.

    In double where there is a ResNet: at these scales its many norms amplify float32 rounding to about 1e-5.
    """
    torch.manual_seed(0)
    theirs = peer.build(peer.spec)
    for parameter in theirs.parameters():
        parameter += 0.02 * torch.randn(parameter.shape)
    has_trunk = isinstance(peer.spec, BiTSpec) or peer.spec.stem is not None
    return theirs.double().eval() if has_trunk else theirs.eval()


# --- the peers --------------------------------------------------------------------------------------------------------

SMALL = ViTSpec(width=128, depth=2, mlp_dim=320, heads=4, patch=8, image_size=(32, 32), num_classes=10, gelu="exact")
TIMM = changed(SMALL, pos_resize="bicubic-antialias")
HF = changed(SMALL, pos_resize="bicubic", norm_eps=1e-12)
DINO = changed(SMALL, mlp_dim=256, num_classes=0, layer_scale=1.0, pos_resize="bicubic")
DINO_REG = changed(DINO, registers=4, pos_resize="bicubic-antialias")
STEM = TrunkSpec(stages=(2, 2, 2, 2), gn_eps=1e-5, ws="var-eps", ws_eps=1e-8)
BIT = BiTSpec(
    trunk=TrunkSpec(stages=(3, 4, 6, 3), preact=True, gn_eps=1e-5, ws="var-eps", ws_eps=1e-8, padding="fixed"),
    num_classes=10,
)
SMALL_BIT = changed(BIT, trunk=changed(BIT.trunk, stages=(1, 2)))


def timm_peer(spec: ModelSpec, other: Pair | None = None) -> Peer:
    args = timm_args(spec)
    dynamic = {"dynamic_img_size": True} if isinstance(spec, ViTSpec) and other else {}
    return Peer(
        "timm",
        spec,
        TimmDialect(),
        lambda _: timm.create_model(**args, **dynamic),
        lambda peer, x: peer(x),
        args,
        other,
    )


def hf_peer(spec: ModelSpec, other: Pair | None) -> Peer:
    """Built from the config that we would write, so that config is on trial too."""
    config = bit_torch.hf_config(spec) if isinstance(spec, BiTSpec) else hf.config_json(spec)
    resize = {"interpolate_pos_encoding": True} if config["model_type"] == "vit" and other else {}

    def build(_: Any) -> nn.Module:
        settings = transformers.AutoConfig.for_model(**{key: v for key, v in config.items() if key != "architectures"})
        model = getattr(transformers, config["architectures"][0])(settings)
        if isinstance(spec, ViTSpec) and spec.registers:
            del model.embeddings.mask_token  # strict loading would ask for it; only masked pre-training reads it
        return model

    def call(peer: nn.Module, x: Tensor) -> Tensor:
        result = peer(x, **resize)
        found = result.logits if "logits" in result else result.pooler_output
        return found.flatten(1)

    bare = not spec.num_classes
    return Peer("hf", spec, HFDialect(bare=bare, in_memory=not isinstance(spec, BiTSpec)), build, call, config, other)


def torchvision_peer(**changes: Any) -> Peer:
    spec = changed(SMALL, pos_resize="corner-bilinear", **changes)

    def build(of: ViTSpec) -> nn.Module:
        return torchvision_models.VisionTransformer(**torchvision_keys.create_args(of))

    def call(peer: nn.Module, x: Tensor) -> Tensor:
        side = x.shape[2]
        if side == spec.image_size[0]:
            return peer(x)
        # torchvision resizes once, on request; its bilinear is the paper's.
        state = torchvision_models.interpolate_embeddings(side, spec.patch, dict(peer.state_dict()), "bilinear")
        larger = build(changed(spec, image_size=(side, side)))
        larger.load_state_dict(state)
        return larger.eval()(x)

    config = {"num_heads": spec.heads}
    return Peer("torchvision", spec, TorchvisionDialect(), build, call, config, (48, 48))


PEERS: dict[str, Peer] = {
    "timm ViT": timm_peer(TIMM, (48, 40)),
    "timm rectangle": timm_peer(changed(TIMM, image_size=(32, 48), gelu="tanh", in_channels=1), (48, 32)),
    "timm gap": timm_peer(changed(TIMM, pool="gap"), (48, 40)),
    "timm map": timm_peer(changed(TIMM, pool="map"), (48, 40)),
    "timm bare cls": timm_peer(changed(TIMM, cls_in_pos=False, num_classes=0), (48, 40)),
    "timm registers": timm_peer(changed(TIMM, registers=4, cls_in_pos=False, layer_scale=0.5), (48, 40)),
    "timm no positions": timm_peer(changed(TIMM, pos="none"), (48, 40)),
    "timm R26 hybrid": timm_peer(changed(TIMM, stem=STEM, patch=1, image_size=(64, 64), depth=1), (96, 64)),
    "timm root-only hybrid": timm_peer(
        changed(TIMM, stem=changed(STEM, stages=()), patch=8, image_size=(64, 64)), (96, 64)
    ),
    "timm BiT": timm_peer(BIT, (49, 67)),
    "HF ViT": hf_peer(HF, (48, 40)),
    "HF tanh, 1e-6": hf_peer(changed(HF, gelu="tanh", norm_eps=1e-6), (48, 40)),
    "HF rectangle, grey": hf_peer(changed(HF, image_size=(32, 48), in_channels=1), None),
    "HF pooler": hf_peer(changed(HF, num_classes=0, head="mlp-tanh"), (48, 40)),
    "HF BiT": hf_peer(SMALL_BIT, (49, 67)),
    "HF BiT, wide": hf_peer(changed(SMALL_BIT, trunk=changed(SMALL_BIT.trunk, width_factor=2, stages=(1,))), (49, 67)),
    "HF DINOv2": hf_peer(DINO, (48, 40)),
    "HF DINOv2 registers": hf_peer(DINO_REG, (48, 40)),
    "torchvision": torchvision_peer(),
    "torchvision pre_logits": torchvision_peer(head="mlp-tanh"),
}
every_peer = pytest.mark.parametrize("name", PEERS)


@torch.no_grad()
def assert_same_answers(peer: Peer, model: Model, theirs: nn.Module) -> None:
    own = None if isinstance(peer.spec, ViTSpec) else (64, 64)  # a ResNet has no size of its own
    for size in (own, peer.other) if peer.other else (own,):
        x_BCYX = images(model, size).to(next(model.parameters()).dtype)
        assert difference(model(x_BCYX), peer.call(theirs, x_BCYX)) <= TOLERANCE, size or "own size"


# --- state dicts ------------------------------------------------------------------------------------------------------


@every_peer
def test_their_state_dict_gives_their_answers(name: str) -> None:
    peer = PEERS[name]
    theirs = shaken(peer)
    model = ours_from(peer, theirs.state_dict(), peer.config)
    assert model.spec == peer.spec
    assert_same_answers(peer, model, theirs)


@every_peer
def test_our_model_loads_strictly_and_answers_the_same(name: str) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    theirs = peer.build(peer.spec)
    theirs.load_state_dict(theirs_from(peer, model), strict=True)
    assert_same_answers(peer, model, theirs.eval())


def test_published_torchvision_names_load_strictly() -> None:
    peer = PEERS["torchvision"]
    model = ours_new(peer.spec)
    published = dataclasses.replace(peer, dialect=TorchvisionDialect(linear_names=True))
    theirs = peer.build(peer.spec)
    theirs.load_state_dict(theirs_from(published, model), strict=True)
    assert_same_answers(peer, model, theirs.eval())


@pytest.mark.parametrize(
    "spec", [changed(DINO, pos_resize="bicubic-offset"), DINO_REG], ids=["without registers", "with registers"]
)
def test_metas_names_are_what_timm_reads_as_dinov2(spec: ViTSpec) -> None:
    """timm knows Meta's files: it drops the mask token and folds the class token's position into the token."""
    model = ours_new(spec)
    arrays = send_out(link(dinov2.rules(spec), spec, "DINOv2"), model.state_dict())
    assert dinov2.recognises(arrays)
    peer = Peer("dinov2", spec, NoDialect(), lambda _: nn.Identity(), lambda peer, x: peer(x), {"num_heads": 4})
    assert ours_from(peer, {**arrays, "mask_token": torch.zeros(1, 128)}, peer.config).spec == spec

    folded = changed(spec, cls_in_pos=not spec.registers)
    args = timm_keys.create_args(folded)
    assert args is not None
    theirs = timm.create_model(**args)
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(
        {**arrays, "mask_token": torch.zeros(1, 128)}, theirs
    )
    theirs.load_state_dict(filtered, strict=True)
    assert_same_answers(peer, model, theirs.eval())


_LISTED = (
    *("R+ViT-Ti/16", "R26+ViT-B/32", "R50+ViT-L/16", "R50+ViT-B/32", "BiT-R101x1", "BiT-R50x3"),
    "ViT-Ti/16",
    "ViT-S/32",
    "ViT-B/8",
    "ViT-L/14",
    "ViT-H/14",
    "ViT-g/14",
    "ViT-G/14",
    "ViT-M/16",
    "ViT-So400m/14",
)


@pytest.mark.parametrize("name", _LISTED)
def test_published_sizes_are_built_by_timm_with_our_arguments(name: str) -> None:
    spec = parse_name(name)
    with torch.device("meta"):
        theirs = timm.create_model(**timm_args(spec))
    format_ = find_format("timm", spec)
    ours = send_out(link(format_.rules(spec, TimmDialect()), spec, "timm"), allocate(spec).state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    assert {key: tuple(tensor.shape) for key, tensor in ours.items()} == shapes
    read = format_.read_spec(theirs.state_dict(), name, {}, None)
    assert format_name(read) == name, "sizes and heads come from the arrays alone"


# --- files that the peers open ----------------------------------------------------------------------------------------


@functools.cache
def photo() -> Image.Image:
    """A photograph if there are any here, else smooth colours: on noise, one pixel's shift of the crop would be everything."""
    path = DATA / "imagenet_samples" / "imagenet_850.npz"
    if path.exists():
        packed = np.load(path)  # JPEG files one after the other
        return Image.open(io.BytesIO(packed["data"][: packed["offsets"][1]].tobytes())).convert("RGB")
    rows, cols = np.mgrid[0:90, 0:120] / 20
    planes = [np.sin(rows + shift) * np.cos(cols * (1 + shift)) for shift in (0.0, 0.5, 1.0)]
    return Image.fromarray(np.uint8(np.stack(planes, axis=2) * 120 + 128))


def our_pixels(rule: Preprocess) -> Tensor:
    return normalise(rule, read(photo(), rule)[None])[0]


def assert_same_pixels(rule: Preprocess, theirs_CYX: Tensor) -> None:
    """The same up to rounding to 8 bits, which the peers do after each of the two passes of a resize."""
    ours_CYX = our_pixels(rule)
    assert ours_CYX.shape == theirs_CYX.shape
    levels = (ours_CYX - theirs_CYX).abs() * torch.tensor(rule.std).view(-1, 1, 1) * 255
    assert levels.max() < 2.5
    assert levels.mean() < 0.5


LABELS = tuple(f"class {index}" for index in range(10))
SHORTER = Preprocess(
    image_size=(32, 32),
    resize="shorter-side",
    crop_frac=32 / 37,
    filter="bicubic",
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.1),
)
RULES = {
    "squash": Preprocess(image_size=(32, 32)),
    "squash and crop": Preprocess(image_size=(32, 32), crop_frac=0.8),
    "shorter side": SHORTER,
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


@pytest.fixture
def silent() -> Iterator[None]:
    """transformers reports and draws progress bars on stderr; a missing or unused weight is asserted, not read there."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield


def write(model: Model, out: Path, to: Target, rule: Preprocess) -> ConvertReport:
    """As `vitlab convert` writes it."""
    labels = LABELS[: model.spec.num_classes]
    return write_foreign(Bundle(model, rule, labels, "card", {}), out, to)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", ["HF ViT", "HF tanh, 1e-6", "HF BiT", "HF BiT, wide"])
def test_our_folder_opens_as_a_classifier(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    write(model, tmp_path / "a", "hf", RULES["squash"])
    opened, report = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "a", output_loading_info=True
    )
    assert not any(report.values()), report
    assert opened.config.id2label[3] == "class 3"
    assert_same_answers(peer, model, opened.eval())


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", ["HF pooler", "HF DINOv2", "HF DINOv2 registers"])
def test_our_folder_opens_as_a_model_without_head(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    write(model, tmp_path / "a", "hf", RULES["squash"])
    opened, report = transformers.AutoModel.from_pretrained(tmp_path / "a", output_loading_info=True)
    missing = set(report["missing_keys"])
    assert missing <= {"embeddings.mask_token"}, "the model with registers always has one; only pre-training reads it"
    assert not any(value for key, value in report.items() if key != "missing_keys"), report
    assert_same_answers(peer, model, opened.eval())


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("name", "rule"), [*(("HF ViT", rule) for rule in RULES.values()), ("HF BiT", SHORTER)])
def test_our_folder_works_in_a_pipeline(name: str, rule: Preprocess, tmp_path: Path) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    write(model, tmp_path / "a", "hf", rule)
    classify = transformers.pipeline("image-classification", model=str(tmp_path / "a"), device="cpu")
    pixels_BCYX = classify.image_processor(photo(), return_tensors="pt")["pixel_values"]
    assert_same_pixels(rule, pixels_BCYX[0])
    with torch.no_grad():
        p_K = model(pixels_BCYX).softmax(dim=1)[0]
    answers = {answer["label"]: answer["score"] for answer in classify(photo(), top_k=10)}
    assert answers == pytest.approx(dict(zip(LABELS, p_K.tolist(), strict=True)), rel=1e-4)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "a")
    processor.save_pretrained(tmp_path / "again")
    assert (
        hf_settings.read_preprocess(json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())) == rule
    )


AREA = Preprocess(image_size=(32, 32), resize="shorter-side", crop_frac=32 / 37, filter="area")


@pytest.mark.usefixtures("silent")
def test_folder_for_images_resized_by_area_opens_and_keeps_the_exact_rule(tmp_path: Path) -> None:
    """No peer has that filter: the rule lies in a key of ours, which must not disturb them, nor be lost on the way."""
    write(ours_new(PEERS["HF ViT"].spec), tmp_path / "hf", "hf", AREA)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    assert processor(photo(), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    processor.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert hf_settings.read_preprocess(again) == AREA
    write(ours_new(PEERS["timm ViT"].spec), tmp_path / "timm", "timm", AREA)
    opened = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(opened))
    assert transform(photo()).shape == (3, 32, 32)
    assert timm_settings.read_preprocess(json.loads((tmp_path / "timm" / "config.json").read_text())) == AREA


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", ["HF DINOv2", "HF DINOv2 registers"])
def test_our_dinov2_folder_works_in_a_pipeline(name: str, tmp_path: Path) -> None:
    """For features: transformers' classifier reads more than the class token, and vitlab has no such head."""
    model = ours_new(PEERS[name].spec)
    write(model, tmp_path / "a", "hf", SHORTER)
    extract = transformers.pipeline("image-feature-extraction", model=str(tmp_path / "a"), device="cpu")
    pixels_BCYX = extract.image_processor(photo(), return_tensors="pt")["pixel_values"]
    assert_same_pixels(SHORTER, pixels_BCYX[0])
    with torch.no_grad():
        assert difference(model(pixels_BCYX), torch.tensor(extract(photo()))[:, 0]) <= TOLERANCE


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("HF")])
def test_their_folder_is_read_whole(name: str, tmp_path: Path) -> None:
    """`save_pretrained` writes the classic names, whatever the modules are called in memory."""
    peer = PEERS[name]
    theirs = shaken(peer)
    theirs.save_pretrained(tmp_path)
    arrays = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert peer.format.read_dialect(arrays) == HFDialect(**peer.format.usual_dialect(peer.spec, "hf"))
    model = ours_from(peer, arrays, json.loads((tmp_path / "config.json").read_text()))
    assert model.spec == peer.spec
    assert_same_answers(peer, model, theirs)


_IN_TIMM = [
    "timm ViT",
    "timm gap",
    "timm map",
    "timm registers",
    "timm R26 hybrid",
    "timm root-only hybrid",
    "timm BiT",
]


@pytest.mark.parametrize("name", _IN_TIMM)
def test_our_file_opens_in_timm_with_the_arguments_that_we_print(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    size = peer.spec.image_size
    report = write(model, tmp_path / "a.safetensors", "timm", Preprocess(image_size=size))
    reported = next(note for note in report.notes if note.startswith("timm needs: create_model(**"))
    args = ast.literal_eval(reported[reported.index("{") : reported.rindex("}") + 1])
    opened = timm.create_model(**args, checkpoint_path=str(tmp_path / "a.safetensors")).eval()
    assert_same_answers(dataclasses.replace(peer, other=None), model, opened)


@pytest.mark.parametrize("name", _IN_TIMM[:2])
def test_our_folder_opens_in_timm_by_itself_and_brings_its_preprocessing(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    model = ours_new(peer.spec)
    rule = Preprocess(image_size=peer.spec.image_size, mean=(0.4, 0.5, 0.6))
    write(model, tmp_path / "folder", "timm", rule)
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert_same_answers(dataclasses.replace(peer, other=None), model, opened)
    assert timm_settings.read_preprocess(opened.pretrained_cfg) == rule


@pytest.mark.parametrize("registers", [0, 4])
def test_our_folder_for_other_images_than_its_positions_opens_in_timm(registers: int, tmp_path: Path) -> None:
    """As DINOv2 is used: positions for 518 pixels, images of 224."""
    spec = changed(DINO_REG, registers=registers, cls_in_pos=not registers, image_size=(48, 48))
    model, rule = ours_new(spec), Preprocess(image_size=(32, 32))
    write(model, tmp_path / "folder", "timm", rule)
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    x_BCYX = images(model, opened.pretrained_cfg["input_size"][1:])
    with torch.no_grad():
        assert difference(model(x_BCYX), opened(x_BCYX)) <= TOLERANCE
    again = read_foreign(tmp_path / "folder")[0]
    assert (again.model.spec.image_size, again.preprocess) == (spec.image_size, rule)


@every_rule
def test_our_settings_are_timms(rule: Preprocess) -> None:
    cfg = timm_settings.pretrained_cfg(TIMM, timm_keys.entry_of(TIMM), rule, LABELS)
    args = timm_keys.create_args(TIMM)
    assert args is not None
    opened = timm.create_model(**args, pretrained_cfg=cfg)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(opened))
    assert_same_pixels(rule, transform(photo()))
    assert timm_settings.read_preprocess(opened.pretrained_cfg) == rule
    assert timm_settings.read_labels(opened.pretrained_cfg, 10) == (LABELS, None)


def test_our_vit_b_16_is_torchvisions(tmp_path: Path) -> None:
    spec = changed(parse_name("ViT-B/16"), gelu="exact", num_classes=10)
    model = ours_new(spec)
    write(model, tmp_path / "a.safetensors", "torchvision", Preprocess())
    theirs = torchvision_models.vit_b_16(num_classes=10)
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "a.safetensors"), strict=True)
    x_BCYX = images(model)
    with torch.no_grad():
        assert difference(model(x_BCYX), theirs.eval()(x_BCYX)) <= TOLERANCE


def test_timms_own_settings_are_read() -> None:
    """The preprocessing that the published models of the paper state."""
    b16 = timm_settings.read_preprocess(timm.get_pretrained_cfg("vit_base_patch16_224.augreg_in21k_ft_in1k").to_dict())
    assert (b16.image_size, b16.resize, b16.filter, b16.mean) == (
        (224, 224),
        "shorter-side",
        "bicubic",
        (0.5, 0.5, 0.5),
    )
    assert round(224 / b16.crop_frac) == 248
    dino = timm_settings.read_preprocess(timm.get_pretrained_cfg("vit_small_patch14_dinov2.lvd142m").to_dict())
    assert (dino.image_size, dino.crop_frac) == ((518, 518), 1.0)
    for name in timm.list_models(["vit_*_patch*_224", "vit_*_r*_s*", "resnetv2_*_bit"], pretrained=True):
        timm_settings.read_preprocess(timm.get_pretrained_cfg(name).to_dict())


# --- timm's own list ------------------------------------------------------------------------------------------------------

SAME = (
    *("vit_tiny_patch16_224", "vit_tiny_patch16_384", "vit_small_patch8_224", "vit_small_patch16_224"),
    *("vit_small_patch32_384", "vit_base_patch8_224", "vit_base_patch16_224", "vit_base_patch32_224"),
    *("vit_base_patch32_384", "vit_large_patch16_224", "vit_base_patch16_plus_240", "vit_small_patch16_36x1_224"),
    *("flexivit_small", "deit_tiny_patch16_224", "deit_small_patch16_224", "deit3_small_patch16_224"),
    *("deit3_medium_patch16_224", "vit_base_patch16_siglip_224", "vit_base_patch16_siglip_gap_224"),
    *("vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
    *("vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224", "vit_base_r26_s32_224", "vit_base_r50_s16_224"),
    *("vit_large_r50_s32_224", "resnetv2_50x1_bit", "resnetv2_101x1_bit"),
)
NAMED = (  # right only by the name of the architecture
    *("test_vit", "vit_base_patch16_gap_224", "vit_base_patch32_siglip_256", "vit_so400m_patch16_siglip_gap_256"),
)
REFUSED = {
    **dict.fromkeys(("deit_tiny_distilled_patch16_224", "deit_small_distilled_patch16_224"), "distillation token"),
    **dict.fromkeys(("vit_base_patch16_clip_224", "vit_base_patch32_clip_quickgelu_224"), "before its first block"),
    **dict.fromkeys(("vit_small_patch16_rope_224", "vit_small_patch16_dinov3"), "positions"),
    **dict.fromkeys(("vit_medium_patch16_gap_240", "vit_base_patch16_224_miil"), "no bias on its queries"),
    **dict.fromkeys(("vit_wee_patch16_reg1_gap_256", "beit_base_patch16_224"), "normalises afterwards"),
    **dict.fromkeys(("vit_small_resnet26d_224", "resnetv2_50"), "has BatchNorm"),
    "vit_giant_patch14_dinov2": "gated",
    "vit_base_patch16_rpn_224": "normalises afterwards",
    "vit_pe_core_tiny_patch16_384": "before its first block",
    "vit_small_patch16_18x2_224": "no known layout",
    "naflexvit_base_patch16_gap": "no known layout",
    "resnetv2_50d": "no known layout",
    "samvit_base_patch16": "pos_embed has shape",
    "cait_xxs24_224": "mixes its heads",
    "vit_small_patch16_rope_ape_224": "scales its blocks",
}


def is_hybrid(name: str) -> bool:
    return re.search(r"_r(esnet)?\d|_r_", name) is not None


def timm_folder(name: str, folder: Path) -> nn.Module:
    """An entry point of timm as it is, except that it is shallow and for tiny images; saved as timm's hub folders are."""
    patch = next((int(word) for word in re.findall(r"patch(\d+)|$", name) if word), 32)
    args: dict[str, Any] = {"num_classes": 5}
    if not name.startswith("resnetv2"):
        args |= {"depth": 1, "img_size": 64 if is_hybrid(name) else 2 * patch}
    torch.manual_seed(0)
    theirs = timm.create_model(name, **args).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"architecture": name, "model_args": args}))
    return theirs


def entry_points() -> list[str]:
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit")
    return [name for module in modules for name in timm.list_models(module=module)]


def test_heads_and_gelu_of_every_entry_point_are_timms(tmp_path: Path) -> None:
    """From the folder that timm writes, for every ViT of timm's whose arrays have the names of ours."""
    gelus = {"GELU": "exact", "GELUTanh": "tanh"}
    wrong, count = dict[str, Any](), 0
    for name in entry_points():
        with torch.device("meta"):
            theirs = timm.create_model(name, depth=1)
        arrays = theirs.state_dict()
        if not timm_keys.has_vit_names(arrays) or "norm.weight" not in arrays:
            continue  # InternViT has no last norm
        timm.models._hub.save_config_for_hf(theirs, tmp_path / "config.json")
        settings = json.loads((tmp_path / "config.json").read_text())
        try:
            spec = timm_keys.read_spec(arrays, name, settings)
        except FileProblem:
            continue
        assert isinstance(spec, ViTSpec)
        count += 1
        block = theirs.blocks[0]
        reported = block.attn.num_heads, gelus[type(block.mlp.act).__name__], theirs.global_pool
        ours = spec.heads, spec.gelu, {"cls": "token", "gap": "avg"}.get(spec.pool, spec.pool)
        assumed = timm_keys.assumptions(spec, settings)
        if ours != reported or assumed:
            wrong[name] = ours, reported, assumed
    assert not wrong
    assert count >= 95, "most of timm's plain ViTs are read"


@pytest.mark.parametrize("name", [*SAME, *NAMED])
def test_entry_points_of_timm_give_timms_answers(name: str, tmp_path: Path) -> None:
    theirs = timm_folder(name, tmp_path)
    bundle, report = read_foreign(tmp_path)
    size = bundle.model.spec.image_size if isinstance(bundle.model.spec, ViTSpec) else (64, 64)
    x_BCYX = images(bundle.model, size)
    has_trunk = is_hybrid(name) or name.startswith("resnetv2")  # whose many norms amplify float32 rounding
    with torch.no_grad():
        assert difference(bundle.model(x_BCYX), theirs(x_BCYX)) <= (1e-4 if has_trunk else TOLERANCE)
    assert not any(note.startswith("No array shows") for note in report.notes), "the architecture has it all"


@pytest.mark.parametrize("name", REFUSED)
def test_entry_points_of_timm_that_vitlab_lacks_are_refused_by_a_sentence(name: str, tmp_path: Path) -> None:
    timm_folder(name, tmp_path)
    with pytest.raises(FileProblem, match=REFUSED[name]):
        read_foreign(tmp_path)


# --- a real file ------------------------------------------------------------------------------------------------------


def test_real_dinov2_weights() -> None:
    path = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"
    if not path.exists():
        pytest.skip(f"the real weights are not here: {path}")
    arrays = safetensors.torch.load_file(path)
    assert dinov2.recognises(arrays)
    assert not timm_keys.recognises(arrays)
    assert dinov2.leftovers(arrays) == ()
    spec = dinov2.read_spec(arrays, path.name)
    assert format_name(spec) == "ViT-S/14"
    assert (spec.image_size, spec.num_classes, spec.layer_scale, spec.registers) == ((518, 518), 0, 1.0, 0)
    assert (spec.gelu, spec.norm_eps, spec.cls_in_pos, spec.pos_resize) == ("exact", 1e-6, True, "bicubic-offset")
    links = link(dinov2.rules(spec), spec, "DINOv2")
    state = bring_in(links, dict(arrays), spec, path.name)
    assert sum(tensor.numel() for tensor in state.values()) == 22_056_192, "the count in the data's own README"
    back = send_out(links, state)
    assert back.keys() == arrays.keys()
    assert all(torch.equal(back[name], arrays[name]) for name in arrays)

    model = load_state(allocate(spec), {name: tensor.float() for name, tensor in state.items()}, path.name).eval()
    theirs = timm.create_model(**timm_args(spec)).eval()
    theirs.load_state_dict({name: array.float() for name, array in arrays.items()}, strict=True)
    x_BCYX = images(model)
    with torch.no_grad():
        ours_BD = model(x_BCYX)
        assert torch.isfinite(ours_BD).all()
        assert ours_BD.shape == (1, 384)
        assert difference(ours_BD, theirs(x_BCYX)) <= TOLERANCE
        assert torch.isfinite(model(images(model, (224, 224)))).all()
