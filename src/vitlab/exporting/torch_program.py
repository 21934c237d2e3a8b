"""torch.export: the traced program itself, as `.pt2`."""

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram

from vitlab.core import fsio
from vitlab.engines.exported import hushed


def write_program(program: ExportedProgram, metadata: Mapping[str, str], out: Path) -> Path:
    buffer = io.BytesIO()
    with hushed():
        torch.export.save(program, buffer, extra_files=dict(metadata))
    fsio.make_folder(out.parent)
    fsio.write_new_file(out, buffer.getvalue())
    return out
