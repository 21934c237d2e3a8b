"""Exported files as models: ONNX, OpenVINO and torch.export, run by their own runtimes.

A file of `vitlab export` describes itself in its metadata: labels, preprocessing, spec, temperature, card. Here is what is
written there and how it is read again, so that the two cannot drift apart. Opening a file runs only the operators in it.
Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.core import config, reading
from vitlab.core.errors import FileProblem, MissingExtra, UsageError, VitlabError
from vitlab.data.preprocess import Preprocess
from vitlab.models.families import spec_from_dict
from vitlab.models.model import Model
from vitlab.models.names import format_name
from vitlab.models.results import Features
from vitlab.models.spec import ModelSpec, TokenKind, spec_to_dict
from vitlab.models.tape import Tape
from vitlab.weights.bundle import Bundle, require_consistent, require_thresholds
from vitlab.weights.card import LICENCE, card_row

FORMAT_VERSION = 1
ONNX, OPENVINO, PROGRAM = "model.onnx", "model.xml", "model.pt2"  # as they are called in a folder
DATA = "model.onnx.data"  # weights beside an ONNX file that is too large for one
INPUT = "images"
# The keys of the metadata. Every value is JSON.
DESCRIBED = (
    *("format_version", "model", "spec", "preprocess", "labels", "temperature", "thresholds"),
    *("licence", "card", "origin", "export"),
)
_SUFFIXES = (".onnx", ".xml", ".pt2")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"}  # OpenVINO's own default is bf16

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Mapping[str, Array]]  # images -> outputs by name


@dataclasses.dataclass(frozen=True)
class Facts:
    """How a file was exported: what it takes and gives."""

    to: str
    precision: str
    batch: int | None  # None: any number of images
    dynamic_size: bool
    preprocess_inside: bool
    outputs: tuple[str, ...]
    versions: dict[str, str]
    parity: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class Opened(NamedTuple):
    """A file with its runtime, before anything is made of it."""

    metadata: Mapping[str, str]
    run: Callable[[Facts], Run]  # once it is known what the file takes


def holds_export(path: Path) -> bool:
    """Whether this is an exported file, or a folder with one: by its name alone."""
    return path.suffix.lower() in _SUFFIXES or any((path / name).is_file() for name in (ONNX, OPENVINO, PROGRAM))


def no_weights(path: Path) -> UsageError:
    """What everything says that needs more of a model than its answers."""
    return UsageError(
        f"{path} is an exported file: it can predict, evaluate and embed, and has no weights for anything else",
        hint="Give the bundle, run or weights that it was exported from.",
    )


class ExportedModel(Model):
    """An exported file in the place of a model: the same images in, the same logits and features out."""

    def __init__(self, path: Path, spec: ModelSpec, facts: Facts, run: Run) -> None:
        super().__init__()
        self.path, self.spec, self.facts, self._run = path, spec, facts, run
        self.head = None
        # So that records and caches know what was measured; other models are named by all of their weights.
        self.register_buffer("sha256", torch.tensor(list(_hashed(path)), dtype=torch.uint8))

    def forward(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        if tape is not None:
            raise no_weights(self.path)
        return self._output(x_BCYX, "logits" if "logits" in self.facts.outputs else "features")

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        if tape is not None:
            raise no_weights(self.path)
        return self._output(x_BCYX, "features")

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:  # noqa: ARG002
        raise no_weights(self.path)

    def first_filters(self) -> tuple[Tensor, str]:
        raise no_weights(self.path)

    def no_attention(self) -> UsageError:
        return no_weights(self.path)

    def _output(self, x_BCYX: Tensor, name: str) -> Tensor:
        size = tuple(x_BCYX.shape[2:])
        if not self.facts.dynamic_size and size != tuple(self.spec.image_size):
            rows, cols = self.spec.image_size
            raise UsageError(f"{self.path} was exported for images of {rows}x{cols}, not {size[0]}x{size[1]}")
        if self.facts.dynamic_size and any(side % self.spec.stride for side in size):
            raise UsageError(
                f"{self.path} takes sides that are multiples of {self.spec.stride}, not {size[0]}x{size[1]}"
            )
        images = x_BCYX.detach().float().cpu().contiguous().numpy()
        rows_BK = np.concatenate([self._run(part)[name][:count] for part, count in _batches(images, self.facts.batch)])
        return torch.from_numpy(rows_BK).to(x_BCYX.device)


def _hashed(path: Path) -> bytes:
    """Of the graph, and of the weights where these lie beside it."""
    digest = hashlib.sha256()
    for each in (path, path.with_suffix(".bin"), path.with_name(DATA)):
        if each == path or (each.is_file() and path.name in (ONNX, OPENVINO)):
            with reading.open_regular(each) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _batches(images: Array, size: int | None) -> Generator[tuple[Array, int]]:
    """The images as the file wants them: all at once, or `size` at a time, the last ones filled up; and how many count."""
    step = size or max(1, len(images))
    for start in range(0, len(images), step):
        part = images[start : start + step]
        lacking = 0 if size is None else size - len(part)
        yield np.concatenate([part, np.repeat(part[:1], lacking, axis=0)]) if lacking else part, len(part)


# --- what a file says of itself ---------------------------------------------------------------------------------------


def describe(bundle: Bundle, facts: Facts) -> dict[str, str]:
    """The metadata of a file."""
    table = {
        "format_version": FORMAT_VERSION,
        "model": format_name(bundle.model.spec),
        "spec": spec_to_dict(bundle.model.spec),
        "preprocess": config.to_dict(bundle.preprocess),
        "labels": list(bundle.labels),
        "temperature": bundle.temperature,
        "thresholds": list(bundle.thresholds),
        "licence": card_row(bundle.card, LICENCE) or "",
        "card": bundle.card,
        "origin": bundle.origin,
        "export": dataclasses.asdict(facts),
    }
    assert tuple(table) == DESCRIBED
    return {key: json.dumps(value, ensure_ascii=False) for key, value in table.items()}


def read_exported(path: Path, *, trust_pickle: bool = False) -> Bundle:
    """The model in an exported file, with its preprocessing and labels."""
    if not path.exists():
        raise FileProblem(f"{path} does not exist")
    file = next((path / name for name in (ONNX, OPENVINO, PROGRAM) if (path / name).is_file()), path)
    with reading.open_regular(file):  # an error of ours for what is not a file
        opened = _OPENERS[file.suffix.lower()](file, trust_pickle)
    origin = str(file)
    if "format_version" not in opened.metadata:
        raise FileProblem(
            f"{origin} was not exported by vitlab: it does not say what its labels are, and how its images are prepared",
            hint="Export it with `vitlab export`, from the weights.",
        )
    try:
        table = {key: reading.parse_json(text, f"{origin}, {key}") for key, text in opened.metadata.items()}
        if table["format_version"] != FORMAT_VERSION:
            raise FileProblem(
                f"{origin} has export format {table['format_version']!r}; this vitlab reads {FORMAT_VERSION}"
            )
        facts = config.from_dict(Facts, table["export"], "export.")
        spec, rule = spec_from_dict(table["spec"]), config.from_dict(Preprocess, table["preprocess"], "preprocess.")
        labels, thresholds, temperature = table["labels"], table["thresholds"], float(table["temperature"])
        require_thresholds(thresholds, labels, origin)
        if not all(isinstance(label, str) for label in labels) or not 0 < temperature < float("inf"):
            raise TypeError
    except (LookupError, TypeError, ValueError) as error:  # a UsageError is a ValueError
        raise FileProblem(f"{origin} describes itself, but not as vitlab does: {error}") from error
    require_consistent(spec, rule, labels, origin)
    model = ExportedModel(file, spec, facts, opened.run(facts)).eval()
    return Bundle(model, rule, tuple(labels), str(table["card"]), dict(table["origin"]), temperature, tuple(thresholds))


# --- runtimes ---------------------------------------------------------------------------------------------------------


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtra("onnxruntime", "onnx", "an ONNX file") from None
    return onnxruntime


def import_openvino() -> Any:
    """OpenVINO without its telemetry, which reports every conversion to its makers: vitlab sends nothing to anybody."""
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType] (as if not installed)
    try:
        import openvino
    except ImportError:
        raise MissingExtra("openvino", "openvino", "an OpenVINO model") from None
    return openvino


def _open_onnx(path: Path, _: bool) -> Opened:
    import_onnxruntime()
    import onnx

    with _explained(path):
        model = onnx.load(path, load_external_data=False)
    _require_own_data(path, model)

    def run(facts: Facts) -> Run:
        source = _behind_pixels(model).SerializeToString() if facts.preprocess_inside else str(path)
        with _explained(path):
            return session_run(source, facts.outputs, base_dir=path.parent)

    return Opened({entry.key: entry.value for entry in model.metadata_props}, run)


def session_run(model: bytes | str, outputs: tuple[str, ...], *, base_dir: Path | None = None) -> Run:
    """An ONNX graph or file on the CPU, by as many threads as torch has. `base_dir`: where weights outside of a graph lie."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3  # warnings are about speed
    if isinstance(model, bytes) and base_dir is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(base_dir))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    there = {output.name for output in session.get_outputs()}
    names, given = [name for name in outputs if name in there], session.get_inputs()[0].name
    return lambda images: dict(zip(names, session.run(names, {given: images}), strict=True))


def _require_own_data(path: Path, model: Any) -> None:
    """Weights outside of the file must be a plain file beside it: the name comes from whoever made the file."""
    places = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    for name in sorted(places):
        beside = path.parent / name
        if not _SAFE_NAME.fullmatch(name) or beside.is_symlink() or not beside.is_file():
            raise FileProblem(
                f"{path} keeps weights in {name!r}, which is not a file beside it", hint="Copy the whole folder."
            )


def upstream(starts: Iterable[str], sources: Mapping[str, Sequence[str]]) -> list[str]:
    """All that these are computed from, and they themselves, by name. `sources`: what each is computed from directly."""
    found, waiting = dict[str, None](), list(starts)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            waiting += sources.get(name, ())
    return list(found)


def onnx_sources(graph: Any) -> dict[str, Sequence[str]]:
    """Of every value of an ONNX graph the values that it is computed from."""
    return {name: node.input for node in graph.node for name in node.output}


def _behind_pixels(model: Any) -> Any:
    """The part of an ONNX graph that sees prepared images: whoever loads it prepares them as for every other model."""
    import onnx

    graph = model.graph
    wanted = [output for output in graph.output if output.name in ("logits", "features")]
    given = [output for output in graph.output if output.name == "pixels"]
    sources = onnx_sources(graph) | {"pixels": ()}
    needed = set(upstream([output.name for output in wanted], sources)) - {"pixels"}
    nodes = [node for node in graph.node if needed.intersection(node.output)]
    for node in nodes:  # the batch size, which was read from what is no longer there
        for place, name in enumerate(node.input):
            if name == INPUT:
                node.input[place] = "pixels"
    used = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    part = onnx.helper.make_graph(nodes, "model", given, wanted, weights)
    return onnx.helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)


def _open_openvino(path: Path, _: bool) -> Opened:
    openvino = import_openvino()
    with _explained(path):
        model = openvino.Core().read_model(path)

    def run(facts: Facts) -> Run:
        seen = _behind_pixels_openvino(openvino, model) if facts.preprocess_inside else model
        with _explained(path):
            return compiled_openvino(seen, facts.precision, facts.outputs)

    table = {
        key: str(model.get_rt_info(["vitlab", key]).astype(str))
        for key in DESCRIBED
        if model.has_rt_info(["vitlab", key])
    }
    return Opened(table, run)


def compiled_openvino(model: Any, precision: str, outputs: tuple[str, ...]) -> Run:
    """On the CPU, computed in the precision that was asked for, by as many threads as torch has."""
    core, hint = import_openvino().Core(), _HINTS[precision]
    if hint == "f16" and "FP16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        hint = "f32"  # it would take bfloat16, which has an eighth of the precision, and say nothing
    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = core.compile_model(model, "CPU", settings)
    there = [name for name in outputs if any(name in output.names for output in compiled.outputs)]

    def run(images: Array) -> Mapping[str, Array]:
        found = compiled(images)
        return {name: np.array(found[name]) for name in there}  # a copy: the next call uses the same memory

    return run


def _behind_pixels_openvino(openvino: Any, model: Any) -> Any:
    source = model.output("pixels").get_node().input_value(0)
    parameter = openvino.opset13.parameter(source.get_partial_shape(), source.get_element_type())
    batch = [use for use in model.input(INPUT).get_target_inputs() if use.get_node().get_type_name() == "ShapeOf"]
    for target in (*source.get_target_inputs(), *batch):
        if target.get_node().get_type_name() != "Result":
            target.replace_source_output(parameter.output(0))
    wanted = [output.get_node() for output in model.outputs if output.names & {"logits", "features"}]
    return openvino.Model(wanted, [parameter])


def _open_program(path: Path, trusted: bool) -> Opened:
    if not trusted:
        raise UsageError(
            f"{path} is a torch.export program, and torch runs what it says while reading it",
            hint="Only for your own: predict, evaluate, compare and embed take --trust-pickle, and vitlab.load "
            "trust_pickle=True. An ONNX file is read without that.",
        )
    metadata = dict.fromkeys(DESCRIBED, "")
    with _explained(path):
        program = torch.export.load(path, extra_files=metadata)
    module = program.module()

    def run(facts: Facts) -> Run:
        if facts.preprocess_inside:
            raise UsageError(f"{path} prepares its images itself; of that kind, ONNX and OpenVINO can be loaded")
        return program_run(module, facts.outputs)

    return Opened({key: text for key, text in metadata.items() if text}, run)


def program_run(module: Any, outputs: tuple[str, ...]) -> Run:
    """A program of torch.export by the names of its outputs."""

    def run(images: Array) -> Mapping[str, Array]:
        with torch.inference_mode():
            found = module(torch.from_numpy(images))
        return {name: tensor.numpy() for name, tensor in zip(outputs, found, strict=True)}

    return run


_OPENERS: dict[str, Callable[[Path, bool], Opened]] = {
    ".onnx": _open_onnx,
    ".xml": _open_openvino,
    ".pt2": _open_program,
}


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None]:
    """The many errors of runtimes as one of ours: these files come from anywhere."""
    try:
        with hushed():
            yield
    except VitlabError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0][:200] if str(error) else repr(error)
        raise FileProblem(f"{path} cannot be opened: {why}") from error


@contextlib.contextmanager
def hushed() -> Generator[None]:
    """Without the warnings and log lines of libraries, which speak to their developers."""
    loggers = [
        logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "nncf", "onnxscript", "root")
    ]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
