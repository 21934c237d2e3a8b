"""The peers: how to build each, what its conventions are called in vitlab, and where its parts are.

A peer is built with its own defaults. What it does differently from the paper is written under `conventions`, in the
fields of vitlab's spec, and nowhere else.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from parity import Names, Tap, Taps, fill, transfer
from torch import nn

from vitlab.models.build import Model, create_model
from vitlab.models.spec import BiTSpec, ModelSpec, Pair, ViTSpec

timm = pytest.importorskip("timm", reason="timm is the oracle here; install vitlab[oracle]")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle here; install vitlab[oracle]")

NUM_CLASSES = 10
Overrides = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """`build` gets vitlab's spec for the sizes, never for the conventions; it runs on the meta device."""

    vitlab: str
    build: Callable[[Any], nn.Module]
    names: Names
    taps: Callable[[Any], Taps]
    conventions: Overrides = dataclasses.field(default_factory=dict)
    has_head: bool = True


def ours(peer: Peer, size: Pair, changes: Overrides | None = None) -> Model:
    """vitlab's model for a peer, for inference; `changes` come on top of the conventions, on the same weights."""
    overrides = _merged(peer.conventions, changes or {})
    num_classes = NUM_CLASSES if peer.has_head else 0
    with torch.device("meta"):  # the initial values would be replaced, and drawing them is slow
        model = create_model(peer.vitlab, num_classes=num_classes, image_size=size, overrides=overrides)
    fill(model.to_empty(device="cpu"))
    return model.eval()


def pair(peer: Peer, size: Pair, changes: Overrides | None = None) -> tuple[Model, nn.Module]:
    """vitlab's model and the peer's, with the same weights."""
    model = ours(peer, size, changes)
    with torch.device("meta"):
        other = peer.build(model.spec)
    transfer(model, other, peer.names)
    return model, other.eval()


def _merged(base: Overrides, changes: Overrides) -> dict[str, Any]:
    nested = {key: _merged(base[key], value) for key, value in changes.items() if isinstance(base.get(key), Mapping)}
    return {**base, **changes, **nested}


def _hf_sizes(spec: ViTSpec) -> dict[str, Any]:
    """Sizes as transformers' configs call them. `eager` is its plain attention: a second opinion on the fused one."""
    return {
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.mlp_dim,
        "patch_size": spec.stride,  # a hybrid reads it for the number of positions only
        "image_size": spec.image_size,
        "attn_implementation": "eager",
    }


# --- taps -------------------------------------------------------------------------------------------------------------


def _block_taps(depth: int, blocks: str, *, norm1: str, attn: str, norm2: str, mlp: str) -> dict[str, Tap]:
    """A residual sum has no module of its own: the first is what `norm2` receives, the second the block's output."""
    taps: dict[str, Tap] = {"tokens": (f"{blocks}.0.{norm1}", "in")}
    for i in range(depth):
        ours, theirs = f"block{i:02d}", f"{blocks}.{i}"
        taps |= {
            f"{ours}/norm1": (f"{theirs}.{norm1}", "out"),
            f"{ours}/attn": (f"{theirs}.{attn}", "out"),
            f"{ours}/+attn": (f"{theirs}.{norm2}", "in"),
            f"{ours}/mlp": (f"{theirs}.{mlp}", "out"),
            f"{ours}/+mlp": (theirs, "out"),
        }
    return taps


def _trunk_taps(stages: tuple[int, ...], ours: str, root: str, unit: str) -> dict[str, Tap]:
    taps: dict[str, Tap] = {f"{ours}root": (root, "out")}
    for s, count in enumerate(stages):
        taps |= {f"{ours}stage{s}/unit{u:02d}": (unit.format(s=s, u=u), "out") for u in range(count)}
    return taps


def _timm_vit_taps(spec: ViTSpec) -> Taps:
    pooled: Tap = ("attn_pool", "out") if spec.pool == "map" else ("head", "in")
    stem: dict[str, Tap] = {}
    if spec.stem is not None:
        backbone = "patch_embed.backbone"
        root = f"{backbone}.stem" if spec.stem.stages else backbone  # without stages the backbone is only its root
        stem = _trunk_taps(spec.stem.stages, "stem/", root, backbone + ".stages.{s}.blocks.{u}")
        stem["stem"] = (backbone, "out")
    return {
        **stem,
        "patches": ("patch_embed.proj", "out"),
        **_block_taps(spec.depth, "blocks", norm1="norm1", attn="attn", norm2="norm2", mlp="mlp"),
        "encoded": ("norm", "out"),
        "pooled": pooled,
        "logits": ("head", "out"),
    }


def _hf_vit_taps(spec: ViTSpec) -> Taps:
    names = {"norm1": "layernorm_before", "attn": "attention", "norm2": "layernorm_after", "mlp": "mlp"}
    return {
        "patches": ("vit.embeddings.patch_embeddings.projection", "out"),
        **_block_taps(spec.depth, "vit.layers", **names),
        "encoded": ("vit.layernorm", "out"),
        "pooled": ("classifier", "in"),
        "logits": ("classifier", "out"),
    }


def _dpt_taps(spec: ViTSpec) -> Taps:
    names = {"norm1": "layernorm_before", "attn": "attention", "norm2": "layernorm_after", "mlp": "output.dense"}
    stem: dict[str, Tap] = {}
    if spec.stem is not None:
        bit = "embeddings.backbone.bit"
        stem = _trunk_taps(spec.stem.stages, "stem/", f"{bit}.embedder", bit + ".encoder.stages.{s}.layers.{u}")
        stem["stem"] = (f"{bit}.encoder.stages.{len(spec.stem.stages) - 1}", "out")
    return {
        **stem,
        "patches": (f"embeddings.{'' if spec.stem else 'patch_embeddings.'}projection", "out"),
        **_block_taps(spec.depth, "encoder.layer", **names),
        "encoded": ("layernorm", "out"),
        "pooled": ("pooler.dense", "in"),
        "pre_logits": ("pooler", "out"),
    }


def _hf_dino_taps(spec: ViTSpec) -> Taps:
    return {
        "patches": ("embeddings.patch_embeddings.projection", "out"),
        **_block_taps(spec.depth, "encoder.layer", norm1="norm1", attn="attention", norm2="norm2", mlp="mlp"),
        "encoded": ("layernorm", "out"),
        "pooled": ("pooler_output", "result"),
    }


def _hf_siglip_taps(spec: ViTSpec) -> Taps:
    names = {"norm1": "layer_norm1", "attn": "self_attn", "norm2": "layer_norm2", "mlp": "mlp"}
    return {
        "patches": ("embeddings.patch_embedding", "out"),
        **_block_taps(spec.depth, "encoder.layers", **names),
        "encoded": ("post_layernorm", "out"),
        "pooled": ("head", "out"),
    }


def _timm_bit_taps(spec: BiTSpec) -> Taps:
    return {
        **_trunk_taps(spec.trunk.stages, "", "stem", "stages.{s}.blocks.{u}"),
        "encoded": ("norm", "out"),
        "pooled": ("head.global_pool", "out"),
        "logits": ("head", "out"),
    }


def _hf_bit_taps(spec: BiTSpec) -> Taps:
    return {
        **_trunk_taps(spec.trunk.stages, "", "bit.embedder", "bit.encoder.stages.{s}.layers.{u}"),
        "encoded": ("bit.norm", "out"),
        "pooled": ("bit.pooler", "out"),
        "logits": ("classifier", "out"),
    }


# --- names of weights -------------------------------------------------------------------------------------------------


def _trunk_names(ours: str, root: str, root_norm: str, unit: str) -> Names:
    stage = rf"{ours}\.stages\.(\d+)\.(\d+)\."
    return {
        rf"{ours}\.root\.(\w+)": rf"{root}.\1",
        rf"{ours}\.root_norm\.(\w+)": rf"{root_norm}.\1",
        rf"{stage}((?:conv|norm)\d)\.(\w+)": rf"{unit}.\3.\4",
        rf"{stage}proj\.(\w+)": rf"{unit}.downsample.conv.\3",
        rf"{stage}proj_norm\.(\w+)": rf"{unit}.downsample.norm.\3",
    }


def _hf_block_names(blocks: str, norms: tuple[str, str], qkv: tuple[str, str, str], out: str) -> Names:
    """transformers keeps q, k and v apart: vitlab's fused matrix is cut into three."""
    block = r"blocks\.(\d+)\."
    q, k, v = (rf"{blocks}.\1.{part}.\2" for part in qkv)
    return {
        rf"{block}norm1\.(\w+)": rf"{blocks}.\1.{norms[0]}.\2",
        rf"{block}norm2\.(\w+)": rf"{blocks}.\1.{norms[1]}.\2",
        rf"{block}attn\.qkv\.(\w+)": (q, k, v),
        rf"{block}attn\.proj\.(\w+)": rf"{blocks}.\1.{out}.\2",
    }


_TIMM_STEM = "patch_embed.backbone."
_TIMM_VIT_NAMES: Names = {
    r"cls": "cls_token",
    r"registers": "reg_token",
    r"pos\.table": "pos_embed",
    r"embed\.(\w+)": r"patch_embed.proj.\1",
    r"(blocks\.\d+\.(?:norm|attn|mlp).+)": r"\1",
    r"blocks\.(\d+)\.scale(\d)": r"blocks.\1.ls\2.gamma",
    r"(norm\.\w+)": r"\1",
    r"map\.probe": "attn_pool.latent",
    r"map\.(.+\.\w+)": r"attn_pool.\1",
    r"(head\.\w+)": r"\1",
    **_trunk_names("stem", f"{_TIMM_STEM}stem.conv", f"{_TIMM_STEM}stem.norm", rf"{_TIMM_STEM}stages.\1.blocks.\2"),
}
_TIMM_ROOT_ONLY_NAMES: Names = {
    **_TIMM_VIT_NAMES,
    **_trunk_names("stem", f"{_TIMM_STEM}conv", f"{_TIMM_STEM}norm", rf"{_TIMM_STEM}stages.\1.blocks.\2"),
}
_TIMM_BIT_NAMES: Names = {
    **_trunk_names("trunk", "stem.conv", "stem.norm", r"stages.\1.blocks.\2"),
    r"(norm\.\w+)": r"\1",
    r"head\.(\w+)": r"head.fc.\1",
}
_HF_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_HF_VIT_NAMES: Names = {
    r"cls": "vit.embeddings.cls_token",
    r"pos\.table": "vit.embeddings.position_embeddings",
    r"embed\.(\w+)": r"vit.embeddings.patch_embeddings.projection.\1",
    **_hf_block_names("vit.layers", ("layernorm_before", "layernorm_after"), _HF_QKV, "attention.o_proj"),
    r"blocks\.(\d+)\.mlp\.(.+)": r"vit.layers.\1.mlp.\2",
    r"norm\.(\w+)": r"vit.layernorm.\1",
    r"head\.(\w+)": r"classifier.\1",
}
_DPT_BIT = "embeddings.backbone.bit."
_DPT_QKV = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
_DPT_NAMES: Names = {
    r"cls": "embeddings.cls_token",
    r"pos\.table": "embeddings.position_embeddings",
    r"embed\.(\w+)": r"embeddings.patch_embeddings.projection.\1",
    **_hf_block_names("encoder.layer", ("layernorm_before", "layernorm_after"), _DPT_QKV, "attention.output.dense"),
    r"blocks\.(\d+)\.mlp\.fc1\.(\w+)": r"encoder.layer.\1.intermediate.dense.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(\w+)": r"encoder.layer.\1.output.dense.\2",
    r"norm\.(\w+)": r"layernorm.\1",
    r"pre_logits\.(\w+)": r"pooler.dense.\1",
}
_DPT_HYBRID_NAMES: Names = {
    **_DPT_NAMES,
    r"embed\.(\w+)": r"embeddings.projection.\1",
    **_trunk_names(
        "stem",
        f"{_DPT_BIT}embedder.convolution",
        f"{_DPT_BIT}embedder.norm",
        rf"{_DPT_BIT}encoder.stages.\1.layers.\2",
    ),
}
_HF_DINO_NAMES: Names = {
    r"cls": "embeddings.cls_token",
    r"registers": "embeddings.register_tokens",
    r"pos\.table": "embeddings.position_embeddings",
    r"embed\.(\w+)": r"embeddings.patch_embeddings.projection.\1",
    **_hf_block_names("encoder.layer", ("norm1", "norm2"), _HF_QKV, "attention.o_proj"),
    r"blocks\.(\d+)\.mlp\.(.+)": r"encoder.layer.\1.mlp.\2",
    r"blocks\.(\d+)\.scale(\d)": r"encoder.layer.\1.layer_scale\2.lambda1",
    r"norm\.(\w+)": r"layernorm.\1",
}
_HF_SIGLIP_NAMES: Names = {
    r"pos\.table": "embeddings.position_embedding.weight",
    r"embed\.(\w+)": r"embeddings.patch_embedding.\1",
    **_hf_block_names(
        "encoder.layers",
        ("layer_norm1", "layer_norm2"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj",
    ),
    r"blocks\.(\d+)\.mlp\.(.+)": r"encoder.layers.\1.mlp.\2",
    r"norm\.(\w+)": r"post_layernorm.\1",
    r"map\.probe": "head.probe",
    r"map\.(?:q|kv)\.(\w+)": r"head.attention.in_proj_\1",  # one matrix there: q first, then k and v
    r"map\.proj\.(\w+)": r"head.attention.out_proj.\1",
    r"map\.norm\.(\w+)": r"head.layernorm.\1",
    r"map\.mlp\.(.+)": r"head.mlp.\1",
}
_HF_BIT_NAMES: Names = {
    **_trunk_names("trunk", "bit.embedder.convolution", "bit.embedder.norm", r"bit.encoder.stages.\1.layers.\2"),
    r"norm\.(\w+)": r"bit.norm.\1",
    r"head\.(\w+)": r"classifier.1.\1",
}


# --- builders ---------------------------------------------------------------------------------------------------------


def _timm_vit(name: str, **options: Any) -> Callable[[ViTSpec], nn.Module]:
    """timm's own entry point, with timm's own sizes; only the depth is ours, so that small tests can be shallow."""

    def build(spec: ViTSpec) -> nn.Module:
        return timm.create_model(
            name, img_size=spec.image_size, num_classes=spec.num_classes, depth=spec.depth, **options
        )

    return build


def _timm_bit(spec: ModelSpec) -> nn.Module:
    return timm.create_model("resnetv2_50x1_bit", num_classes=spec.num_classes)


def _hf_vit(**options: Any) -> Callable[[ViTSpec], nn.Module]:
    def build(spec: ViTSpec) -> nn.Module:
        config = transformers.ViTConfig(**_hf_sizes(spec), num_labels=spec.num_classes, **options)
        return transformers.ViTForImageClassification(config)

    return build


def _hf_dpt(spec: ViTSpec) -> nn.Module:
    return transformers.DPTModel(transformers.DPTConfig(**_hf_sizes(spec), is_hybrid=spec.stem is not None))


def _hf_dino(spec: ViTSpec) -> nn.Module:
    sizes = _hf_sizes(spec)
    config = transformers.Dinov2WithRegistersConfig(**sizes, num_register_tokens=spec.registers)
    model = transformers.Dinov2WithRegistersModel(config)
    del model.embeddings.mask_token  # only masked pre-training reads it
    return model


def _hf_siglip(spec: ViTSpec) -> nn.Module:
    side, other = spec.image_size
    assert side == other, "SigLIP is built for squares"
    with torch.device("cpu"):  # it holds a buffer that no state dict would fill on the meta device
        config = transformers.SiglipVisionConfig(**{**_hf_sizes(spec), "image_size": side})
        return transformers.SiglipVisionModel(config)


def _hf_bit(spec: ModelSpec) -> nn.Module:
    return transformers.BitForImageClassification(transformers.BitConfig(num_labels=spec.num_classes))


# --- the peers --------------------------------------------------------------------------------------------------------

_TIMM: Overrides = {"gelu": "exact", "norm_eps": 1e-6, "pos_resize": "bicubic-antialias"}
_HF: Overrides = {"gelu": "exact", "norm_eps": 1e-12, "pos_resize": "bicubic"}
_DPT: Overrides = {**_HF, "pos_resize": "bilinear", "head": "mlp-tanh"}
_PEER_STEM: Overrides = {"gn_eps": 1e-5, "ws": "var-eps", "ws_eps": 1e-8, "padding": "same"}
_PEER_BIT: Overrides = {"trunk": {"gn_eps": 1e-5, "ws": "var-eps", "ws_eps": 1e-8, "padding": "fixed"}}
# transformers' own defaults for DINOv2: LN eps 1e-6 and an antialiased resize, unlike its ViT.
_DINO: Overrides = {"gelu": "exact", "norm_eps": 1e-6, "layer_scale": 1.0, "registers": 4}
_SIGLIP: Overrides = {"gelu": "tanh", "norm_eps": 1e-6, "pos_resize": "bicubic", "pool": "map"}


def _timm_peer(vitlab: str, name: str, conventions: Overrides = _TIMM, **options: Any) -> Peer:
    return Peer(vitlab, _timm_vit(name, **options), _TIMM_VIT_NAMES, _timm_vit_taps, conventions)


def _hf_peer(vitlab: str, conventions: Overrides = _HF, **options: Any) -> Peer:
    return Peer(vitlab, _hf_vit(**options), _HF_VIT_NAMES, _hf_vit_taps, conventions)


_HYBRID_TIMM = {**_TIMM, "stem": _PEER_STEM}

PEERS: dict[str, Peer] = {
    "timm ViT-S/16": _timm_peer("ViT-S/16", "vit_small_patch16_224"),
    "timm ViT-B/16": _timm_peer("ViT-B/16", "vit_base_patch16_224"),
    "timm ViT-S/16 any size": _timm_peer("ViT-S/16", "vit_small_patch16_224", dynamic_img_size=True),
    # With the paper's GELU, timm agrees with vitlab's defaults: nothing else is left to set at the native size.
    "timm ViT-S/16 tanh": _timm_peer("ViT-S/16", "vit_small_patch16_224", {}, act_layer="gelu_tanh"),
    # timm's default for `avg` pools first and normalises afterwards; the paper's code normalises first.
    "timm ViT-S/16 gap": _timm_peer(
        "ViT-S/16",
        "vit_small_patch16_224",
        {**_TIMM, "pool": "gap"},
        global_pool="avg",
        class_token=False,
        fc_norm=False,
    ),
    "timm ViT-S/16 map": _timm_peer(
        "ViT-S/16", "vit_small_patch16_224", {**_TIMM, "pool": "map"}, global_pool="map", class_token=False
    ),
    # big_vision's layout: positions belong to patches only.
    "timm ViT-S/16 bare cls": _timm_peer(
        "ViT-S/16", "vit_small_patch16_224", {**_TIMM, "cls_in_pos": False}, no_embed_class=True
    ),
    "timm DINOv2 S/14": _timm_peer(
        "ViT-S/14",
        "vit_small_patch14_reg4_dinov2",
        {**_DINO, "cls_in_pos": False, "pos_resize": "bicubic-antialias"},
        dynamic_img_size=True,
    ),
    "timm R50+ViT-B/16": _timm_peer("R50+ViT-B/16", "vit_base_r50_s16_224", _HYBRID_TIMM),
    "timm R26+ViT-S/32": _timm_peer("R26+ViT-S/32", "vit_small_r26_s32_224", _HYBRID_TIMM),
    "timm R+ViT-Ti/16": dataclasses.replace(
        _timm_peer("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224", _HYBRID_TIMM), names=_TIMM_ROOT_ONLY_NAMES
    ),
    "timm BiT-R50x1": Peer("BiT-R50x1", _timm_bit, _TIMM_BIT_NAMES, _timm_bit_taps, _PEER_BIT),
    "transformers ViT-S/16": _hf_peer("ViT-S/16"),
    "transformers ViT-B/16": _hf_peer("ViT-B/16"),
    "transformers ViT-S/16 tanh": _hf_peer("ViT-S/16", {"norm_eps": 1e-12}, hidden_act="gelu_pytorch_tanh"),
    "transformers DPT S/16": Peer("ViT-S/16", _hf_dpt, _DPT_NAMES, _dpt_taps, _DPT, has_head=False),
    "transformers R50+ViT-B/16": Peer(
        "R50+ViT-B/16", _hf_dpt, _DPT_HYBRID_NAMES, _dpt_taps, {**_DPT, "stem": _PEER_STEM}, has_head=False
    ),
    "transformers DINOv2 S/14": Peer(
        "ViT-S/14",
        _hf_dino,
        _HF_DINO_NAMES,
        _hf_dino_taps,
        {**_DINO, "pos_resize": "bicubic-antialias"},
        has_head=False,
    ),
    "transformers SigLIP S/16": Peer(
        "ViT-S/16", _hf_siglip, _HF_SIGLIP_NAMES, _hf_siglip_taps, _SIGLIP, has_head=False
    ),
    "transformers BiT-R50x1": Peer("BiT-R50x1", _hf_bit, _HF_BIT_NAMES, _hf_bit_taps, _PEER_BIT),
}
