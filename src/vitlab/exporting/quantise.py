"""int8 after training: ranges of activations measured on images, for ONNX by onnxruntime, for OpenVINO by NNCF."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from vitlab.core import fsio
from vitlab.engines.exported import INPUT, Array, hushed, import_openvino, upstream
from vitlab.exporting.onnx_file import upstream_of_pixels

_QUANTISED = ("MatMul", "Gemm", "Conv")  # where the time goes; all else stays in float32


def quantised_onnx(model: Any, images: Sequence[Array]) -> Any:
    """Weights in 8 bits per channel and activations in 8 bits, between QuantizeLinear and DequantizeLinear (QDQ)."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.waiting = iter(images)

        def get_next(self) -> dict[str, Array] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            image = next(self.waiting, None)
            return None if image is None else {INPUT: image}

    with hushed(), fsio.scratch_folder() as scratch:
        quantize_static(
            model,
            scratch / "quantised.onnx",
            Images(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_QUANTISED),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=upstream_of_pixels(model),
            # Only products with weights: those of two activations, in attention, lose the most in int8 and gain the least.
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(scratch / "quantised.onnx")


def quantised_openvino(model: Any, images: Sequence[Array], *, transformer: bool) -> Any:
    """By NNCF's post-training quantisation."""
    import_openvino()  # first: it switches telemetry off, also that of NNCF
    import nncf

    preprocessing = _preprocessing_products(model)
    with hushed(), contextlib.redirect_stdout(io.StringIO()):
        return nncf.quantize(
            model,
            nncf.Dataset(list(images)),
            subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER if transformer else None,
            ignored_scope=nncf.IgnoredScope(names=preprocessing) if preprocessing else None,
        )


def _preprocessing_products(model: Any) -> list[str]:
    """Names of the matrix products that preprocess images, which stay exact."""
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    sources = {
        name: [value.get_node().get_friendly_name() for value in node.input_values()] for name, node in nodes.items()
    }
    ends = [output.get_node().get_friendly_name() for output in model.outputs if "pixels" in output.names]
    return [name for name in upstream(ends, sources) if nodes[name].get_type_name() == "MatMul"]
