"""The official equations in NumPy, straight from Google's array names and layouts: a second opinion on reading them.

Written from the published module definitions (flax ViT, hybrid ResNet, BiT), in double precision. Images are [B, Y, X, C].
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def layer_norm(x: Array, p: Arrays, name: str) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q_in: Array, kv_in: Array, p: Arrays, name: str) -> Array:
    q, k, v = (
        np.einsum("btd,dhe->bthe", x, p[f"{name}/{part}/kernel"]) + p[f"{name}/{part}/bias"]
        for x, part in ((q_in, "query"), (kv_in, "key"), (kv_in, "value"))
    )
    weights = softmax(np.einsum("bqhe,bkhe->bhqk", q / np.sqrt(q.shape[-1]), k))
    mixed = np.einsum("bhqk,bkhe->bqhe", weights, v)
    return np.einsum("bqhe,hed->bqd", mixed, p[f"{name}/out/kernel"]) + p[f"{name}/out/bias"]


def mlp(x: Array, p: Arrays, name: str) -> Array:
    hidden = gelu(x @ p[f"{name}/Dense_0/kernel"] + p[f"{name}/Dense_0/bias"])
    return hidden @ p[f"{name}/Dense_1/kernel"] + p[f"{name}/Dense_1/bias"]


def conv(x: Array, kernel: Array, stride: int, padding: str | int) -> Array:
    """Cross-correlation, HWIO kernel, with SAME or explicit symmetric padding."""
    size = kernel.shape[0]
    if padding == "same":
        pads = []
        for side in x.shape[1:3]:
            total = max(0, (-(-side // stride) - 1) * stride + size - side)
            pads.append((total // 2, total - total // 2))
    else:
        pads = [(int(padding), int(padding))] * 2
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    windows = sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]
    return np.einsum("byxcij,ijco->byxo", windows, kernel)


def max_pool(x: Array, pads: tuple[tuple[int, int], tuple[int, int]], value: float) -> Array:
    x = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=value)
    return sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(-1, -2))


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    b, y, w, c = x.shape
    grouped = x.reshape(b, y, w, 32, c // 32)
    mean, var = grouped.mean((1, 2, 4), keepdims=True), grouped.var((1, 2, 4), keepdims=True)
    return ((grouped - mean) / np.sqrt(var + eps)).reshape(x.shape) * scale.reshape(-1) + bias.reshape(-1)


def vit(p: Arrays, images: Array, *, pre_linen: bool = False, big_vision: bool = False) -> Array:
    norm2, att, dense = ("LayerNorm_2", "MultiHeadDotProductAttention_1", "MlpBlock_3") if pre_linen else (
        "LayerNorm_1", "MultiHeadDotProductAttention_0", "MlpBlock_0",
    )  # fmt: skip
    x = hybrid_stem(p, images) if "conv_root/kernel" in p else images
    kernel = p["embedding/kernel"]
    side, (b, rows, cols, _) = kernel.shape[0], x.shape
    patches = x.reshape(b, rows // side, side, cols // side, side, -1).transpose(0, 1, 3, 2, 4, 5)
    z = patches.reshape(b, -1, kernel[..., 0].size) @ kernel.reshape(-1, kernel.shape[3]) + p["embedding/bias"]
    if big_vision:
        z = z + p["pos_embedding"]
    if "cls" in p:
        z = np.concatenate([np.repeat(p["cls"], b, axis=0), z], axis=1)
    if not big_vision:
        z = z + p["Transformer/posembed_input/pos_embedding"]
    depth = len({name.split("/")[1] for name in p if name.startswith("Transformer/encoderblock_")})
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        y = layer_norm(z, p, f"{block}/LayerNorm_0")
        z = z + attention(y, y, p, f"{block}/{att}")
        z = z + mlp(layer_norm(z, p, f"{block}/{norm2}"), p, f"{block}/{dense}")
    z = layer_norm(z, p, "Transformer/encoder_norm")
    if "MAPHead_0/probe" in p:
        y = attention(np.repeat(p["MAPHead_0/probe"], b, axis=0), z, p, "MAPHead_0/MultiHeadDotProductAttention_0")
        z = (y + mlp(layer_norm(y, p, "MAPHead_0/LayerNorm_0"), p, "MAPHead_0/MlpBlock_0"))[:, 0]
    else:
        z = z[:, 0] if "cls" in p else z.mean(axis=1)
    if "pre_logits/kernel" in p:
        z = np.tanh(z @ p["pre_logits/kernel"] + p["pre_logits/bias"])
    return z @ p["head/kernel"] + p["head/bias"]


def hybrid_stem(p: Arrays, images: Array) -> Array:
    def std_conv(x: Array, name: str, stride: int = 1) -> Array:
        w = p[name]
        w = (w - w.mean((0, 1, 2))) / (w.std((0, 1, 2)) + 1e-5)
        return conv(x, w, stride, "same")

    def norm(x: Array, name: str) -> Array:
        return group_norm(x, p[f"{name}/scale"], p[f"{name}/bias"], 1e-6)

    x = np.maximum(norm(std_conv(images, "conv_root/kernel", 2), "gn_root"), 0)
    # SAME for an even side, kernel 3 and stride 2: nothing before, one after.
    x = max_pool(x, ((0, 1), (0, 1)), -np.inf)
    units = sorted({tuple(map(int, (n.split("/")[0][5:], n.split("/")[1][4:]))) for n in p if n.startswith("block")})
    for block, unit in units:
        name, stride = f"block{block}/unit{unit}", 2 if block > 1 and unit == 1 else 1
        shortcut = x
        if f"{name}/conv_proj/kernel" in p:
            shortcut = norm(std_conv(x, f"{name}/conv_proj/kernel", stride), f"{name}/gn_proj")
        y = np.maximum(norm(std_conv(x, f"{name}/conv1/kernel"), f"{name}/gn1"), 0)
        y = np.maximum(norm(std_conv(y, f"{name}/conv2/kernel", stride), f"{name}/gn2"), 0)
        x = np.maximum(shortcut + norm(std_conv(y, f"{name}/conv3/kernel"), f"{name}/gn3"), 0)
    return x


def bit(p: Arrays, images: Array) -> Array:
    def std_conv(x: Array, name: str, stride: int = 1, padding: int = 0) -> Array:
        w = p[f"{name}/standardized_conv2d/kernel"]
        w = (w - w.mean((0, 1, 2))) / np.sqrt(w.var((0, 1, 2)) + 1e-10)
        return conv(x, w, stride, padding)

    def act(x: Array, name: str) -> Array:
        return np.maximum(group_norm(x, p[f"{name}/group_norm/gamma"], p[f"{name}/group_norm/beta"], 1e-5), 0)

    x = std_conv(images, "resnet/root_block", 2, 3)
    x = max_pool(x, ((1, 1), (1, 1)), 0.0)
    for name in sorted({"/".join(n.split("/")[:3]) for n in p if n.startswith("resnet/block")}):
        stride = 2 if name.endswith("unit01") and "block1/" not in name else 1
        y = act(x, f"{name}/a")
        has_proj = f"{name}/a/proj/standardized_conv2d/kernel" in p
        shortcut = std_conv(y, f"{name}/a/proj", stride) if has_proj else x
        y = std_conv(y, f"{name}/a")
        y = std_conv(act(y, f"{name}/b"), f"{name}/b", stride, 1)
        x = shortcut + std_conv(act(y, f"{name}/c"), f"{name}/c")
    pooled = act(x, "resnet").mean(axis=(1, 2))
    return pooled @ p["resnet/head/conv2d/kernel"][0, 0] + p["resnet/head/conv2d/bias"]
