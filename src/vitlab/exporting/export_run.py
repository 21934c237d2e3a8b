"""`vitlab export`: a model as a file for other runtimes, compared with the model before it is written."""

import dataclasses
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.environment import package_version
from vitlab.core.errors import MissingExtra, UsageError, VitlabError, require_choice
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.session import open_session, require_single_process
from vitlab.data.dataset import Dataset
from vitlab.data.sources.opening import open_data, open_images
from vitlab.engines.classifier import (
    describe_model,
    load,
    require_weights,
    stop_dry_run_before_download,
    tell_zero_head,
)
from vitlab.engines.exported import Facts, Run, compiled_openvino, describe, hushed, import_openvino, program_run
from vitlab.exporting import onnx_file, openvino_file, parity, quantise
from vitlab.exporting.graph import Graph, GraphRule, output_names, require_exportable, traced
from vitlab.exporting.parity import Parity
from vitlab.models.spec import ViTSpec
from vitlab.options.exporting_options import ExportOptions, Precision, Target
from vitlab.options.option import takes
from vitlab.runs.evaluation.parts import as_in_the_run, columns_of_run, data_of_run
from vitlab.weights.bundle import Bundle

_PRECISIONS: Mapping[Target, tuple[Precision, ...]] = {
    "onnx": ("fp32", "fp16", "int8"),  # onnxruntime has no bfloat16 on CPUs
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "torch-export": ("fp32", "fp16", "bf16"),
}
_ENDINGS: Mapping[Target, str] = {"onnx": ".onnx", "openvino": "", "torch-export": ".pt2"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LIBRARIES = ("vitlab", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
_GENERATED = "shapes:image_size=128"
_CALIBRATION_IMAGES = 128


@dataclasses.dataclass(frozen=True)
class Export:
    """What was written, and how it compares with the model."""

    out: Path
    to: Target
    precision: Precision
    inputs: str
    outputs: tuple[str, ...]
    bytes: int
    seconds: float
    parity: Parity
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "out": str(self.out)}

    def sentences(self) -> list[str]:
        return [
            f"{self.to}, {self.precision}: {self.inputs} -> {', '.join(self.outputs)}",
            *self.parity.sentences(),
            *self.notes,
            f"{self.out}, {self.bytes / 1e6:,.1f} MB, {self.seconds:.0f} s",
        ]


@takes(ExportOptions)
def export(options: ExportOptions) -> Export:
    """Write a model as ONNX, OpenVINO or torch.export, with preprocessing and labels in the file.

    Before anything is written, the exported graph and the model answer for the same real images, at several batch sizes and,
    where it takes several, image sizes. Where they differ by more than `limit`, that is an error, and there is no file.
    `predict`, `evaluate` and `embed` take the file in place of a model.
    """
    started, out = time.perf_counter(), Path(options.out)
    rule = GraphRule(options.batch_size, options.dynamic_size, options.preprocess_inside)
    _require_call(options, out)
    with open_session("cpu", 0, options.threads, quiet=options.quiet) as (_, world, console):
        require_single_process(world, "models are exported")
        stop_dry_run_before_download(options.dry_run, [options.model], {"to": options.to, "out": out})
        classifier = load(options.model, image_size=options.image_size, device="cpu", quiet=options.quiet)
        require_weights(classifier)
        bundle = dataclasses.replace(classifier.bundle, model=classifier.model)
        require_exportable(bundle.model, rule)
        if tell_zero_head(bundle) and not options.force:
            raise UsageError(
                "the head is all zeros: every class would get the same score, whatever is exported",
                hint="Train it first, or leave it out with `vitlab convert MODEL OUT --drop head`; --force continues.",
            )
        dataset, named = _images(options)
        stop_if_dry_run(
            options.dry_run,
            {
                "model": describe_model(classifier),
                "to": f"{options.to}, {options.precision}",
                "check": named,
                "out": out,
            },
        )
        photos, ranges, notes = _photos(options, bundle, dataset)
        console.say(f"export     {describe_model(classifier)} to {options.to}")
        made = _make(bundle, rule, options, ranges)
        found = parity.compare(made.run, bundle, rule, photos, named)
        for line in found.sentences():
            console.detail(line)
        parity.require_parity(found, options.precision, rule, options.limit, options.agreement)
        facts = dataclasses.replace(made.facts, parity=found.to_json())
        written = made.write(describe(bundle, facts))
    size = sum(file.stat().st_size for file in (written.iterdir() if written.is_dir() else [written]))
    seconds = round(time.perf_counter() - started, 1)
    return Export(
        written, options.to, options.precision, _takes(bundle, rule), facts.outputs, size, seconds, found, notes
    )


def _require_call(options: ExportOptions, out: Path) -> None:
    """Errors, before any work, for what cannot be written."""
    require_choice("to", options.to, tuple(_PRECISIONS))
    require_choice("precision", options.precision, ("fp32", "fp16", "bf16", "int8"))
    if options.precision not in _PRECISIONS[options.to]:
        able = " and ".join(to for to, kinds in _PRECISIONS.items() if options.precision in kinds)
        raise UsageError(f"{options.to} cannot be written in {options.precision}", hint=f"{able} can.")
    if options.calibration is not None and options.precision != "int8":
        raise UsageError("--calibration goes with --precision int8")
    if out.suffix.lower() != _ENDINGS[options.to]:
        wanted = f"a file that ends in {_ENDINGS[options.to]}" if _ENDINGS[options.to] else "a folder, for two files"
        raise UsageError(f"{out} cannot be the name of an export to {options.to}, which is {wanted}")
    match options.to:
        case "onnx":
            onnx_file.require_onnx()
            onnx_file.require_opset(options.opset)
        case "openvino":
            import_openvino()
            if options.precision == "int8" and package_version("nncf") is None:
                raise MissingExtra("nncf", "openvino", "int8 for OpenVINO")
        case "torch-export":
            pass
        case _:
            assert_never(options.to)
    fsio.require_free(out)


# --- the images -------------------------------------------------------------------------------------------------------


def _images(options: ExportOptions) -> tuple[Dataset, str]:
    """What to compare on, and what it is called in the report."""
    if options.check is not None:
        return _any_part(options.check), str(options.check)
    if (source := data_of_run(options.model)) is not None:
        try:
            opened = open_data(source, columns=columns_of_run(options.model, source), console=Console(quiet=True))
            opened = as_in_the_run(options.model, source, opened)
            part = next(name for name in ("val", "test", "all", "train") if name in opened.parts)
            return opened.parts[part], f"{source} ({part})"
        except VitlabError:  # the data has moved since
            pass
    return _any_part(_GENERATED), "generated shapes, for want of photos: name some with --check"


def _any_part(where: str | Path) -> Dataset:
    opened = open_images(where, console=Console(quiet=True))
    return opened.part("val", "test", "all", "train")


def _photos(
    options: ExportOptions, bundle: Bundle, dataset: Dataset
) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
    """Those to compare on; for int8 also others that set its ranges, and a note on these."""
    if options.precision != "int8":
        return parity.decoded(dataset, options.check_images, bundle.preprocess), [], ()
    if options.calibration is not None and options.calibration != options.check:
        photos = parity.decoded(dataset, options.check_images, bundle.preprocess)
        ranges = parity.decoded(_any_part(options.calibration), _CALIBRATION_IMAGES, bundle.preprocess)
        return photos, ranges, (f"calibrated on {len(ranges):,} images of {options.calibration}",)
    # On the images that set its ranges, int8 looks better than it is.
    found = parity.decoded(dataset, options.check_images + _CALIBRATION_IMAGES, bundle.preprocess)
    if len(found) < 2:
        raise UsageError(
            "int8 is calibrated on some images and compared on others, and there is one image only",
            hint="Name images with --check, and others with --calibration.",
        )
    compared = max(1, min(options.check_images, len(found) - min(_CALIBRATION_IMAGES, len(found) // 2)))
    chosen = {i * len(found) // compared for i in range(compared)}  # evenly from all
    photos = [photo for i, photo in enumerate(found) if i in chosen]
    ranges = [photo for i, photo in enumerate(found) if i not in chosen]
    return photos, ranges, (f"calibrated on {len(ranges):,} other images of the same",)


# --- the formats ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Made:
    """A graph in its format, in memory: it can be run, and written."""

    facts: Facts
    run: Run
    write: Callable[[Mapping[str, str]], Path]


def _make(bundle: Bundle, rule: GraphRule, options: ExportOptions, photos: list[Tensor]) -> _Made:
    # ONNX and OpenVINO are converted from float32 by their own tools, which know what has to stay in it.
    dtype = _DTYPES.get(options.precision, torch.float32) if options.to == "torch-export" else torch.float32
    with hushed():
        program = traced(Graph(bundle, rule, dtype), bundle, rule)
    outputs, out, to = output_names(bundle.model, rule), Path(options.out), options.to
    facts = Facts(to, options.precision, rule.batch, rule.dynamic_size, rule.preprocess_inside, outputs, _versions())
    ranges = parity.calibration_batches(photos, bundle.preprocess, rule) if options.precision == "int8" else []
    match to:
        case "onnx":
            model = onnx_file.to_onnx(program, outputs, rule, options.opset)
            if options.precision == "fp16":
                model = onnx_file.in_half_precision(model)
            elif options.precision == "int8":
                model = quantise.quantised_onnx(model, ranges)
            return _Made(
                facts,
                onnx_file.onnx_run(model, outputs),
                lambda metadata: onnx_file.write_onnx(onnx_file.with_metadata(model, metadata), out),
            )
        case "openvino":
            network = openvino_file.to_openvino(program, outputs)
            if options.precision == "int8":
                is_vit = isinstance(bundle.model.spec, ViTSpec)
                network = quantise.quantised_openvino(network, ranges, transformer=is_vit)
            half = options.precision == "fp16"
            network = openvino_file.as_written(network, half=half)
            return _Made(
                facts,
                compiled_openvino(network, options.precision, outputs),
                lambda metadata: openvino_file.write_openvino(network, metadata, out, half=half),
            )
        case "torch-export":
            return _Made(
                facts, program_run(program.module(), outputs), lambda metadata: _write_program(program, metadata, out)
            )
        case _:
            assert_never(to)


def _write_program(program: torch.export.ExportedProgram, metadata: Mapping[str, str], out: Path) -> Path:
    """torch.export: the traced program itself, as `.pt2`."""
    buffer = io.BytesIO()
    with hushed():
        torch.export.save(program, buffer, extra_files=dict(metadata))
    fsio.make_folder(out.parent)
    fsio.write_new_file(out, buffer.getvalue())
    return out


def _takes(bundle: Bundle, rule: GraphRule) -> str:
    """`images [batch, 3, 224, 224] float32`."""
    batch, channels, (rows, cols) = rule.batch or "batch", bundle.model.spec.in_channels, bundle.preprocess.image_size
    if rule.preprocess_inside:
        return f"images [{batch}, rows, columns, {channels}] uint8"
    sides = "rows, columns" if rule.dynamic_size else f"{rows}, {cols}"
    return f"images [{batch}, {channels}, {sides}] float32"


def _versions() -> dict[str, str]:
    return {name: version for name in _LIBRARIES if (version := package_version(name)) is not None}
