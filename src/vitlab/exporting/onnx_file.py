"""ONNX: a traced graph as one file, or above protobuf's limit as a folder with the weights beside it."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from vitlab.core import fsio
from vitlab.core.errors import MissingExtra, UsageError
from vitlab.engines.exported import DATA, INPUT, ONNX, Run, hushed, onnx_sources, session_run, upstream
from vitlab.exporting.graph import GraphRule

OLDEST_OPSET, NEWEST_OPSET = 18, 23  # those that torch writes; LayerNormalization is one operator from 17 on
_MOST_BYTES = 2**31 - 2**20  # of one protobuf message, with room for the metadata
_LEAST_OUTSIDE = 1024  # bytes of a tensor that lies outside of the graph; shapes have to stay in it
_LOWEST, _LOWEST_FLOAT = "lowest", -3.4e38  # near the end of float32: no number is below
_PRODUCTS = ("MatMul", "Gemm", "Conv")


def require_onnx() -> None:
    """An error, before any work, where ONNX cannot be written."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise MissingExtra("onnx", "onnx", "writing ONNX") from None
    del onnx, onnxruntime


def require_opset(opset: int) -> None:
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UsageError(f"--opset must lie in {OLDEST_OPSET} to {NEWEST_OPSET}, not {opset}")


def to_onnx(program: ExportedProgram, outputs: tuple[str, ...], rule: GraphRule, opset: int) -> Any:
    """The graph as a `ModelProto`, with readable names for what is open."""
    import torch.onnx

    with hushed(), contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        converted = torch.onnx.export(
            program,
            dynamo=True,
            external_data=False,
            optimize=True,
            verbose=False,
            opset_version=opset,
            input_names=[INPUT],
            output_names=list(outputs),
        )
    assert converted is not None
    model: Any = converted.model_proto
    _name_dimensions(model.graph, rule)
    _keep_pads(model.graph)
    del model.graph.value_info[:]  # shapes of intermediates, by the old names; runtimes infer them
    return model


def _name_dimensions(graph: Any, rule: GraphRule) -> None:
    names = {0: "batch"} | ({1: "rows", 2: "columns"} if rule.preprocess_inside else {2: "rows", 3: "columns"})
    renamed: dict[str, str] = {}
    for place, dimension in enumerate(graph.input[0].type.tensor_type.shape.dim):
        if dimension.dim_param:
            renamed[dimension.dim_param] = names[place]
    for value in (*graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in renamed:
                dimension.dim_param = renamed[dimension.dim_param]


def _keep_pads(graph: Any) -> None:
    """Part each zero padding from the maximum pooling after it, by an operator that changes nothing.

    onnxruntime (1.31) makes one operator of the two and forgets the zeros: at the borders, pooling then gives negative numbers.
    """
    from onnx import TensorProto, helper

    padded = {node.output[0] for node in graph.node if node.op_type == "Pad"}
    nodes = list[Any]()
    for node in graph.node:
        if node.op_type == "MaxPool" and node.input[0] in padded:
            apart = f"{node.input[0]}_apart"
            nodes.append(helper.make_node("Max", [node.input[0], _LOWEST], [apart], f"{node.name}_apart"))
            node.input[0] = apart
        nodes.append(node)
    if len(nodes) > len(graph.node):
        graph.initializer.append(helper.make_tensor(_LOWEST, TensorProto.FLOAT, (), [_LOWEST_FLOAT]))
        del graph.node[:]
        graph.node.extend(nodes)


def upstream_of_pixels(model: Any) -> list[str]:
    """The names of the nodes that prepare images: they stay as exact as they are."""
    values = set(upstream(["pixels"], onnx_sources(model.graph)))  # none where the graph has no such output
    return [node.name for node in model.graph.node if values.intersection(node.output)]


def in_half_precision(model: Any) -> Any:
    """Products and their weights in float16; norms, softmax and sums stay in float32, and so do both ends of the graph.

    Written here, because onnxruntime's own converter makes invalid graphs of norms that share a weight.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, exact = model.graph, set(upstream_of_pixels(model))
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes, halves = list[Any](), dict[str, Any]()
    for node in graph.node:
        if node.op_type not in _PRODUCTS or node.name in exact:
            nodes.append(node)
            continue
        for place, name in enumerate(node.input):
            if name in weights:
                halves[name] = numpy_helper.from_array(
                    numpy_helper.to_array(weights[name]).astype("float16"), f"{name}_half"
                )
                node.input[place] = f"{name}_half"
            elif name:
                node.input[place] = f"{node.name}_half_{place}"
                nodes.append(helper.make_node("Cast", [name], [node.input[place]], to=TensorProto.FLOAT16))
        result, node.output[0] = node.output[0], f"{node.name}_half"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [result], to=TensorProto.FLOAT)]
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [*(tensor for tensor in graph.initializer if tensor.name in used), *halves.values()]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def with_metadata(model: Any, metadata: Mapping[str, str]) -> Any:
    import onnx

    onnx.helper.set_model_props(model, dict(metadata))
    return model


def _size(model: Any) -> int:
    """Bytes of the weights. Asked for its own size, protobuf fails on what is too large for it."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def write_onnx(model: Any, out: Path, most_bytes: int = _MOST_BYTES) -> Path:
    """One file; where that would be too large, a folder of the same name with the graph, and the weights beside it."""
    if _size(model) <= most_bytes:
        fsio.make_folder(out.parent)
        fsio.write_new_file(out, model.SerializeToString())
        return out
    pieces, at = list[bytes](), 0
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= _LEAST_OUTSIDE:
            pieces.append(tensor.raw_data)
            place = {"location": DATA, "offset": str(at), "length": str(len(tensor.raw_data))}
            at += len(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = tensor.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
    with fsio.new_folder(out, size=at) as folder:
        folder.write(ONNX, model.SerializeToString())
        folder.write(DATA, pieces)
    return out


def onnx_run(model: Any, outputs: tuple[str, ...]) -> Run:
    """The graph in memory, run by onnxruntime as a loaded file is."""
    if _size(model) <= _MOST_BYTES:
        return session_run(model.SerializeToString(), outputs)
    import onnx

    with fsio.scratch_folder() as scratch:  # too large for one message
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        write_onnx(copy, scratch / "large")
        return session_run(str(scratch / "large" / ONNX), outputs)
