"""Write weights in other formats; what one cannot hold is an error or a note.

Owns the targets of `vitlab convert`, what each writes, and what it must be told. The way in is in `foreign.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.console import Advance, Console
from vitlab.core.errors import UsageError
from vitlab.models.names import format_name
from vitlab.models.spec import BiTSpec, ModelSpec
from vitlab.weights import conventions
from vitlab.weights.bundle import Bundle, Description, save_bundle
from vitlab.weights.containers import npz_chunks, safetensors_chunks
from vitlab.weights.foreign import DESCRIPTION, WEIGHT_SUFFIXES, ConvertReport
from vitlab.weights.formats import bit, dinov2, google, hf, hf_settings, timm_keys, timm_settings, torchvision_keys
from vitlab.weights.formats.readings import preprocess_difference
from vitlab.weights.rules import Rule, link, send_out

Target = Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision", "dinov2"]
TARGETS: tuple[Target, ...] = ("vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision", "dinov2")
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
    rules, notes = _target_rules(spec, bundle, to)
    if bundle.temperature != 1:
        notes = [*notes, f"the temperature {bundle.temperature:g} stays behind: this format has no place for it"]
    if bundle.thresholds:
        notes = [*notes, "the thresholds stay behind: this format has no place for what labels an image has"]
    prefix = str(bundle.origin.get("prefix", "")) if _FILES.get(to) == ".npz" and _is_again(bundle, to) else ""
    arrays = {prefix + name: array for name, array in send_out(link(rules, spec, to), state).items()}
    with console.progress("write", len(arrays)) as advance:
        _write(bundle, out, to, arrays, advance)
    return ConvertReport("vitlab", to, format_name(spec), len(arrays), (), (), (), tuple(notes), str(out))


def _is_again(bundle: Bundle, to: Target) -> bool:
    """Did the bundle come from this very format? Then it is written as it was."""
    return {"bit-npz": "google-npz"}.get(bundle.origin.get("format", ""), bundle.origin.get("format")) == to


def _target_rules(spec: ModelSpec, bundle: Bundle, to: Target) -> tuple[list[Rule], list[str]]:
    """The rules that write this model, and notes on what differs there."""
    remembered: dict[str, Any] = bundle.origin.get("dialect", {}) if _is_again(bundle, to) else {}
    if to in ("google-npz", "big-vision"):
        return _google(spec, bundle, to, remembered)
    if to == "timm":
        return _timm(spec, bundle, remembered)
    if to == "hf":
        dialect = _dialect(hf.HFDialect, remembered) if remembered else hf.default_dialect(spec)
        notes = filter(None, [preprocess_difference("transformers'", bundle.preprocess)])
        return hf.rules(spec, dialect), [*notes, *hf.differences(spec)]
    if isinstance(spec, BiTSpec):
        raise UsageError(f"{to} has no BiT ResNets")
    if to == "dinov2":
        dinov2.require_meta(spec)
        notes = [f"DINOv2 needs: DinoVisionTransformer(**{dinov2.create_args(spec)})"]
        notes.append("Its mask_token, which only pre-training reads, is not in the file: load with strict=False.")
        return dinov2.rules(spec), [*notes, *dinov2.differences(spec)]
    dialect = _dialect(torchvision_keys.TorchvisionDialect, remembered)
    notes = [f"torchvision needs: VisionTransformer(**{torchvision_keys.create_args(spec)})"]
    return torchvision_keys.rules(spec, dialect), [*notes, *torchvision_keys.differences(spec)]


def _google(spec: ModelSpec, bundle: Bundle, to: Target, remembered: dict[str, Any]) -> tuple[list[Rule], list[str]]:
    is_bit = isinstance(spec, BiTSpec)
    behind = ["labels"] * (bundle.labels != tuple(str(k) for k in range(spec.num_classes)))
    behind += ["preprocessing"] * (bundle.preprocess != conventions.assumed("bit-npz" if is_bit else to, spec))
    notes = [f"{' and '.join(behind)} stay behind: this format has no place for them"] if behind else []
    if isinstance(spec, BiTSpec):
        return bit.rules(spec, _dialect(bit.BiTDialect, remembered)), [
            *notes,
            *bit.differences(spec, big_vision=to == "big-vision"),
        ]
    google.require_google(spec, to)
    # All files that Google published have the names of the first code, before linen.
    usual = {"big_vision": to == "big-vision", "pre_linen": to == "google-npz"}
    dialect = _dialect(google.GoogleDialect, {**usual, **remembered})
    return google.rules(spec, dialect), [*notes, *google.differences(spec)]


def _timm(spec: ModelSpec, bundle: Bundle, remembered: dict[str, Any]) -> tuple[list[Rule], list[str]]:
    arguments = timm_keys.create_args(spec, bundle.preprocess.image_size)
    needs = "timm has no entry point that builds this model" if arguments is None else ""
    notes = [needs or f"timm needs: create_model(**{arguments})"]
    notes += filter(None, [preprocess_difference("timm's", bundle.preprocess)])
    rules = timm_keys.rules(spec, _dialect(timm_keys.TimmDialect, remembered))
    return rules, [*notes, *timm_keys.differences(spec)]


_Dialect = TypeVar("_Dialect")


def _dialect(kind: type[_Dialect], remembered: dict[str, Any]) -> _Dialect:
    """What a bundle remembers came from a file, and is checked like one."""
    return config.from_dict(kind, remembered, "origin.dialect.")


def _write(bundle: Bundle, out: Path, to: Target, arrays: Mapping[str, Tensor], advance: Advance) -> None:
    spec, metadata = bundle.model.spec, {"format": "pt"}
    fsio.make_folder(out.parent)
    if _FILES.get(to) == ".npz":
        fsio.write_new_file(out, npz_chunks(arrays, advance))
    elif out.suffix == _FILES.get(to):
        described = Description(spec, bundle.preprocess, bundle.labels).to_json()
        fsio.write_new_file(out, safetensors_chunks(arrays, {**metadata, DESCRIPTION: described}, advance))
    else:
        beside = _settings(bundle, to)
        with fsio.new_folder(out) as folder:
            folder.write("model.safetensors", safetensors_chunks(arrays, metadata, advance))
            for name, table in beside.items():
                folder.write_json(name, table)


def _settings(bundle: Bundle, to: Target) -> dict[str, dict[str, Any]]:
    """What lies beside the weights in a folder."""
    spec = bundle.model.spec
    if to == "timm":
        return {"config.json": timm_settings.config_json(spec, bundle.preprocess, bundle.labels)}
    return {
        "config.json": hf_settings.config_json(spec, bundle.labels),
        "preprocessor_config.json": hf_settings.preprocessor_json(bundle.preprocess),
    }
