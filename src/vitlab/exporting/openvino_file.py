"""OpenVINO: a traced graph as a folder of `model.xml` and `model.bin`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from vitlab.core import fsio
from vitlab.engines.exported import INPUT, OPENVINO, hushed, import_openvino

_WEIGHTS = "model.bin"


def to_openvino(program: ExportedProgram, outputs: tuple[str, ...]) -> Any:
    """The graph as an `openvino.Model`, its ends named."""
    openvino = import_openvino()
    with hushed():
        model = openvino.convert_model(program)
    model.inputs[0].set_names({INPUT})
    for output, name in zip(model.outputs, outputs, strict=True):
        output.set_names({name})
    return model


def as_written(model: Any, *, half: bool) -> Any:
    """The network as its file will have it: with weights in half precision, it is another one."""
    openvino = import_openvino()
    with fsio.scratch_folder() as scratch:
        openvino.save_model(model, scratch / OPENVINO, compress_to_fp16=half)
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": False})  # the folder goes
        return core.read_model(scratch / OPENVINO)


def write_openvino(model: Any, metadata: Mapping[str, str], out: Path, *, half: bool) -> Path:
    """A new folder. OpenVINO writes files alone, so they are made in a scratch folder and copied from there."""
    openvino = import_openvino()
    for key, value in metadata.items():
        model.set_rt_info(value, ["vitlab", key])
    fsio.make_folder(out.parent)
    with fsio.scratch_folder() as scratch:
        openvino.save_model(model, scratch / OPENVINO, compress_to_fp16=half)
        with fsio.new_folder(out) as folder:
            for name in (OPENVINO, _WEIGHTS):
                folder.write(name, fsio.file_chunks(scratch / name))
    return out
