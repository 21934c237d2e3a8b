"""Every family in ONNX and OpenVINO: the same answers as torch's, in any batch and, where it can be, at any size."""

import collections
import os
from typing import Any

import numpy as np
import pytest
import torch
from export_models import FAMILIES, LABELS, with_scores
from torch import Tensor, nn

from vitlab.data.preprocess import Preprocess
from vitlab.engines.exported import compiled_openvino, hushed
from vitlab.exporting.graph import Graph, GraphRule, output_names, traced
from vitlab.exporting.onnx_file import onnx_run, to_onnx
from vitlab.exporting.openvino_file import to_openvino
from vitlab.exporting.parity import compare
from vitlab.models.build import build
from vitlab.weights.bundle import Bundle

pytestmark = pytest.mark.slow  # to trace one family takes seconds; a plain ViT is exported in test_export.py
ONE_SIZE = ("AxialResNet",)
SOAK = os.environ.get("VITLAB_SOAK") == "1"
SOME = ("DINOv2", "EfficientNet")  # tokens and convolutions; a plain ViT is that of test_export.py


def photos(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(0, 256, (count, 3, 4, 5), dtype=torch.uint8, generator=generator)
    return list(nn.functional.interpolate(small.float(), (60, 70), mode="bicubic").clamp(0, 255).to(torch.uint8))


@pytest.mark.parametrize("name", FAMILIES if SOAK else SOME)
def test_both_runtimes_give_the_answers_of_torch(name: str) -> None:
    spec = FAMILIES[name]
    bundle = Bundle(with_scores(build(spec, seed=0)), Preprocess(image_size=spec.image_size), LABELS, "", {})
    rule = GraphRule(dynamic_size=name not in ONE_SIZE)
    outputs = output_names(bundle.model, rule)
    with hushed():
        program = traced(Graph(bundle, rule), bundle, rule)
    graph = to_onnx(program, outputs, rule, 20)
    runs = {
        "onnx": onnx_run(graph, outputs),
        "openvino": compiled_openvino(to_openvino(program, outputs), "fp32", outputs),
    }
    for runtime, run in runs.items():
        found = compare(run, bundle, rule, photos(16), "pictures")
        assert {row.batch for row in found.comparisons} == {1, 3, 8}
        sizes = {row.image_size for row in found.comparisons}
        assert len(sizes) == (1 if name in ONE_SIZE else 2 if min(spec.image_size) == spec.stride else 3)
        assert found.agreement == 1 and found.difference <= 1e-4 * max(1, found.largest_score), runtime
        assert found.largest_score > 0.1, "scores that are all zero would agree with anything"
    assert norms(graph) == {
        "LayerNormalization": sum(isinstance(module, nn.LayerNorm) for module in bundle.model.modules())
    }


def test_zeros_around_an_image_count_in_pooling_by_the_default_onnxruntime() -> None:
    """onnxruntime's fusion of padding and pooling drops them, and all that is below zero at the border comes through."""
    negative = torch.nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, 2))
    program = torch.export.export(negative, (-torch.ones(1, 1, 5, 5),))
    with hushed():
        graph = to_onnx(program, ("logits",), GraphRule(batch=1), 20)
    pooled = onnx_run(graph, ("logits",))(-np.ones((1, 1, 5, 5), np.float32))["logits"]
    assert pooled.max() == 0 and pooled.min() == -1


def norms(graph: Any) -> dict[str, int]:
    """Layer norms that are one operator, and pieces of such that are not: nothing else here takes a root."""
    counts = collections.Counter(node.op_type for node in graph.graph.node)
    return {name: counts[name] for name in ("LayerNormalization", "Sqrt") if counts[name] or name[0] == "L"}
