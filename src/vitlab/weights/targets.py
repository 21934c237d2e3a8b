"""Write weights in other formats; what one cannot hold is an error or a note.

Owns the targets of `vitlab convert`, what each writes, and what it must be given. The way in is in `foreign.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.console import Advance, Console
from vitlab.core.errors import UsageError
from vitlab.models.names import format_name
from vitlab.weights.bundle import Bundle, Description, save_bundle
from vitlab.weights.containers import npz_chunks, safetensors_chunks
from vitlab.weights.foreign import DESCRIPTION, WEIGHT_SUFFIXES, ConvertReport
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.table import find_format
from vitlab.weights.rules import Rule, link, send_out

Target = Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision", "dinov2"]
TARGETS: tuple[Target, ...] = get_args(Target)
_FILES = {"google-npz": ".npz", "big-vision": ".npz"} | dict.fromkeys(("timm", "torchvision", "dinov2"), ".safetensors")
_FOLDERS = ("vitlab", "hf", "timm")
_WORTH_SHOWING = 300e6  # bytes; what is smaller is written before a bar would be drawn


def require_place(out: Path, to: Target) -> None:
    """Raise if `out` exists, or its suffix does not suit the format."""
    is_file, is_folder = out.suffix == _FILES.get(to), to in _FOLDERS and out.suffix not in WEIGHT_SUFFIXES
    if not is_file and not is_folder:
        kinds = [*([f"a {_FILES[to]} file"] if to in _FILES else []), *(["a folder"] if to in _FOLDERS else [])]
        raise UsageError(f"{to} writes {' or '.join(kinds)}; {out.name} is the name of something else")
    fsio.require_free(out)


def write_foreign(bundle: Bundle, out: Path, to: Target, console: Console | None = None) -> ConvertReport:
    """Writes the bundle's weights in another format, to a new place."""
    require_place(out, to)
    state, spec = bundle.model.state_dict(), bundle.model.spec
    large = sum(tensor.nbytes for tensor in state.values()) > _WORTH_SHOWING
    console = console if console and large else Console(quiet=True)
    if to == "vitlab":
        with console.progress("write", len(state)) as advance:
            save_bundle(out, bundle, advance)
        return ConvertReport("vitlab", to, format_name(spec), len(state), (), (), (), (), str(out))
    rules, _ = _target_rules(bundle, to)
    notes = tell_target(bundle, to)
    prefix = str(bundle.origin.get("prefix", "")) if _FILES.get(to) == ".npz" and _is_again(bundle, to) else ""
    arrays = {prefix + name: array for name, array in send_out(link(rules, spec, to), state).items()}
    with console.progress("write", len(arrays)) as advance:
        _write(bundle, out, to, arrays, advance)
    return ConvertReport("vitlab", to, format_name(spec), len(arrays), (), (), (), tuple(notes), str(out))


def tell_target(bundle: Bundle, to: Target) -> list[str]:
    """Notes on what this format cannot hold; an error where it cannot hold the model."""
    if to == "vitlab":
        return []
    _, notes = _target_rules(bundle, to)
    if bundle.temperature != 1:
        notes = [*notes, f"the temperature {bundle.temperature:g} stays behind: this format has no place for it"]
    if bundle.thresholds:
        notes = [*notes, "the thresholds stay behind: this format has no place for what labels an image has"]
    return notes


def _is_again(bundle: Bundle, to: Target) -> bool:
    """Did the bundle come from this very format? Then it is written as it was."""
    return {"bit-npz": "google-npz"}.get(bundle.origin.get("format", ""), bundle.origin.get("format")) == to


def _target_rules(bundle: Bundle, to: Target) -> tuple[list[Rule], list[str]]:
    """The rules that write this model, and notes on what differs there."""
    spec, chosen = bundle.model.spec, find_format(to, bundle.model.spec)
    chosen.require_target(spec, to)
    # What a bundle remembers came from a file, and is checked like one.
    remembered: dict[str, Any] = bundle.origin.get("dialect", {}) if _is_again(bundle, to) else {}
    dialect = config.from_dict(chosen.dialect, {**chosen.usual_dialect(spec, to), **remembered}, "origin.dialect.")
    notes = [*(_left_behind(bundle, chosen, to) if _FILES.get(to) == ".npz" else ())]
    return chosen.rules(spec, dialect), [*notes, *chosen.notes(spec, bundle.preprocess, to)]


def _left_behind(bundle: Bundle, chosen: Format[Any, Any], to: Target) -> list[str]:
    """What Google's files have no place for."""
    spec = bundle.model.spec
    behind = ["labels"] * (bundle.labels != tuple(str(k) for k in range(spec.num_classes)))
    behind += ["preprocessing"] * (bundle.preprocess != chosen.preprocess(spec, to))
    return [f"{' and '.join(behind)} stay behind: this format has no place for them"] if behind else []


def _write(bundle: Bundle, out: Path, to: Target, arrays: Mapping[str, Tensor], advance: Advance) -> None:
    spec, metadata = bundle.model.spec, {"format": "pt"}
    fsio.make_folder(out.parent)
    if _FILES.get(to) == ".npz":
        fsio.write_new_file(out, npz_chunks(arrays, advance))
    elif out.suffix == _FILES.get(to):
        described = Description(spec, bundle.preprocess, bundle.labels).to_json()
        fsio.write_new_file(out, safetensors_chunks(arrays, {**metadata, DESCRIPTION: described}, advance))
    else:
        chosen = find_format(to, spec)
        beside = chosen.folder(spec, bundle.preprocess, bundle.labels) if chosen.folder else {}
        with fsio.new_folder(out) as folder:
            folder.write("model.safetensors", safetensors_chunks(arrays, metadata, advance))
            for name, table in beside.items():
                folder.write_json(name, table)
