"""Anybody's weights in, anybody's weights out: finds out what a file is, and accounts for every array in it.

Owns the meeting of container, format and preprocessing. The formats know names, the containers know bytes; nothing is guessed
from a file's name, and every assumption is a note that the caller shows.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import allocate
from vitlab.models.names import format_name
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec
from vitlab.weights.bundle import Bundle, load_state, require_finite, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.containers import ArrayFile, npz_bytes, read_arrays, safetensors_bytes
from vitlab.weights.formats import bit, dinov2, google, hf, timm_keys, torchvision_keys
from vitlab.weights.rules import Rule, bring_in, link, send_out

Target = Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision"]
TARGETS: tuple[Target, ...] = ("vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision")
_IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclasses.dataclass(frozen=True)
class ConvertReport:
    """What happened to the arrays, in the words of `vitlab convert --json`."""

    source: str
    target: str
    model: str
    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    notes: tuple[str, ...]
    out: str | None = None

    def sentences(self) -> list[str]:
        left = f"; left out: {', '.join(self.unexpected)}" if self.unexpected else ""
        said = [f"{self.source}: {self.model}, {self.matched} arrays matched, none missing{left}"]
        said += self.notes
        return [*said, f"{self.target} -> {self.out}"] if self.out else said


@dataclasses.dataclass(frozen=True)
class _Format:
    name: str
    recognises: Callable[[Mapping[str, Tensor]], bool]
    read_spec: Callable[[Mapping[str, Tensor], str, Mapping[str, Any] | None], ModelSpec]
    rules: Callable[[Any, Mapping[str, Tensor]], list[Rule]]
    dialect: Callable[[Mapping[str, Tensor]], Any]
    leftovers: Callable[[Mapping[str, Tensor]], tuple[str, ...]] = lambda _: ()


_FORMATS = (
    _Format(
        "google-npz",
        google.recognises,
        lambda arrays, origin, _: google.read_spec(arrays, origin),
        lambda spec, arrays: google.rules(spec, google.read_dialect(arrays)),
        google.read_dialect,
    ),
    _Format(
        "bit-npz",
        bit.recognises,
        lambda arrays, origin, _: bit.read_spec(arrays, origin),
        lambda spec, _: bit.rules(spec),
        lambda _: None,
    ),
    _Format(
        "timm",
        timm_keys.recognises,
        timm_keys.read_spec,
        lambda spec, arrays: timm_keys.rules(spec, timm_keys.read_dialect(arrays)),
        timm_keys.read_dialect,
    ),
    _Format(
        "hf",
        hf.recognises,
        hf.read_spec,
        lambda spec, arrays: hf.rules(spec, hf.read_dialect(arrays)),
        hf.read_dialect,
        hf.leftovers,
    ),
    _Format(
        "torchvision",
        torchvision_keys.recognises,
        torchvision_keys.read_spec,
        lambda spec, arrays: torchvision_keys.rules(spec, torchvision_keys.read_dialect(arrays)),
        torchvision_keys.read_dialect,
    ),
    _Format(
        "dinov2",
        dinov2.recognises,
        dinov2.read_spec,
        lambda spec, _: dinov2.rules(spec),
        lambda _: None,
        dinov2.leftovers,
    ),
)


# --- in ---------------------------------------------------------------------------------------------------------------


def read_foreign(
    path: Path, *, drop: Sequence[str] = (), trust_pickle: bool = False, part: str | None = None
) -> tuple[Bundle, ConvertReport]:
    """Any supported file or transformers folder as a bundle in memory, with the account of its arrays.

    `drop` names arrays to leave out, as shell patterns; a leftover that nobody named is an error.
    """
    weights, settings, preprocessor = _find_parts(path)
    found = read_arrays(weights, trust_pickle=trust_pickle, part=part)
    origin = str(path)
    arrays = {name: array for name, array in found.arrays.items() if not _is_dropped(name, drop)}
    if bit.recognises(arrays):
        arrays = bit.plain_names(arrays)
    chosen = _recognise(arrays, origin)
    left = {*chosen.leftovers(arrays), *(found.arrays.keys() - arrays.keys() if drop else ())}
    arrays = {name: array for name, array in arrays.items() if name not in left}
    spec = chosen.read_spec(arrays, origin, settings)
    state = bring_in(link(chosen.rules(spec, arrays), spec, chosen.name), arrays, spec, origin)
    require_finite(state)
    preprocess, notes = _read_preprocess(chosen.name, spec, settings, preprocessor)
    labels = _read_labels(settings, spec)
    if spec.num_classes and not state["head.weight"].any():
        notes.append("The head is all zeros: this checkpoint is for fine-tuning, not for predicting.")
    model = load_state(allocate(spec), state, origin).float().eval()
    bundle = Bundle(model, preprocess, labels, _card(path, spec, chosen.name), _origin(chosen, found, arrays))
    report = ConvertReport(
        chosen.name, "vitlab", format_name(spec), len(arrays), (), tuple(sorted(left)), (), tuple(notes)
    )
    return bundle, report


def _recognise(arrays: Mapping[str, Tensor], origin: str) -> _Format:
    for candidate in _FORMATS:
        if candidate.recognises(arrays):
            return candidate
    some = ", ".join(list(arrays)[:3])
    known = ", ".join(candidate.name for candidate in _FORMATS)
    raise FileProblem(f"{origin} holds {len(arrays)} arrays of no known layout: {some} …", hint=f"Known: {known}.")


def _is_dropped(name: str, drop: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}/") for pattern in drop)


def _find_parts(path: Path) -> tuple[Path, dict[str, Any] | None, dict[str, Any] | None]:
    """The weights file, and the settings and preprocessing that lie beside it in a folder."""
    if not path.is_dir():
        return path, None, None
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name, _read_json(path / "config.json"), _read_json(path / "preprocessor_config.json")
    raise FileProblem(f"{path} holds no weights", hint="Looked for a bundle, model.safetensors and pytorch_model.bin.")


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileProblem(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FileProblem(f"{path} must hold a table of keys")
    return value


def _read_preprocess(
    name: str, spec: ModelSpec, settings: dict[str, Any] | None, preprocessor: dict[str, Any] | None
) -> tuple[Preprocess, list[str]]:
    """What the file says, else the format's documented convention and a note that says so."""
    if name == "hf" and preprocessor is not None:
        return hf.read_preprocess(preprocessor), []
    if name == "timm" and settings is not None and "pretrained_cfg" in settings:
        return timm_keys.read_preprocess(settings["pretrained_cfg"]), []
    mode = "L" if spec.in_channels == 1 else "RGB"
    if spec.in_channels not in (1, 3):
        raise UsageError(f"images of {spec.in_channels} channels cannot be prepared yet")
    size = spec.image_size
    if name in ("dinov2", "torchvision") and mode == "RGB":
        size = (224, 224) if name == "dinov2" else size
        how = "bicubic" if name == "dinov2" else "bilinear"
        rule = Preprocess(image_size=size, resize="shorter-side", crop_frac=0.875, filter=how, **_IMAGENET)
    else:
        half = (0.5,) * spec.in_channels
        rule = Preprocess(
            mode=mode, image_size=size, antialias=name not in ("google-npz", "bit-npz"), mean=half, std=half
        )
    told = f"{rule.resize} to {size[0]}x{size[1]}, mean {rule.mean[0]:g} …"
    return rule, [f"The file brings no preprocessing; the {name} convention is assumed: {told}"]


def _read_labels(settings: dict[str, Any] | None, spec: ModelSpec) -> tuple[str, ...]:
    labels = hf.read_labels(settings) if settings is not None else ()
    return labels if len(labels) == spec.num_classes else tuple(str(i) for i in range(spec.num_classes))


def _origin(chosen: _Format, found: ArrayFile, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    dialect = chosen.dialect(arrays)
    told = {} if dialect is None else dataclasses.asdict(dialect)
    return {"format": chosen.name, "dialect": told, "prefix": found.prefix, "container": found.container}


def _card(path: Path, spec: ModelSpec, name: str) -> str:
    return write_card(
        title=path.name,
        spec=spec,
        data="not told by the file",
        command=f"vitlab convert {path.name}",
        seed=0,
        metrics={"converted from": name},
        licence="that of the source",
    )


# --- out --------------------------------------------------------------------------------------------------------------


def write_foreign(bundle: Bundle, out: Path, to: Target) -> ConvertReport:
    """Writes the bundle's weights in another format; what that format cannot hold is an error, never left out."""
    fsio.require_free(out)
    spec = bundle.model.spec
    notes: list[str] = []
    if to == "vitlab":
        save_bundle(out, bundle)
        matched = len(bundle.model.state_dict())
    else:
        rules, notes = _target_rules(spec, bundle, to)
        arrays = send_out(link(rules, spec, to), bundle.model.state_dict())
        arrays = {
            str(bundle.origin.get("prefix", "")) * (bundle.origin.get("format") == to) + k: v for k, v in arrays.items()
        }
        matched = len(arrays)
        _write(bundle, out, to, arrays)
    return ConvertReport("vitlab", to, format_name(spec), matched, (), (), (), tuple(notes), str(out))


def _target_rules(spec: ModelSpec, bundle: Bundle, to: Target) -> tuple[list[Rule], list[str]]:
    remembered: dict[str, Any] = bundle.origin.get("dialect", {}) if bundle.origin.get("format") == to else {}
    if isinstance(spec, BiTSpec) and to in ("google-npz", "big-vision"):
        return bit.rules(spec), []
    if to in ("google-npz", "big-vision"):
        assert isinstance(spec, ViTSpec)
        dialect = google.GoogleDialect(**{"big_vision": to == "big-vision", **remembered})
        if spec.uses_cls and spec.cls_in_pos == dialect.big_vision:
            raise UsageError(
                f"{to} keeps the class token's position {'apart' if dialect.big_vision else 'in the table'}"
            )
        return google.rules(spec, dialect), _unlike(spec, {"gelu": "tanh", "norm_eps": 1e-6})
    if to == "timm":
        arguments = timm_keys.create_args(spec)
        told = [] if arguments is None else [f"timm needs: create_model(**{arguments})"]
        return timm_keys.rules(spec, timm_keys.TimmDialect(**remembered)), [*told, *timm_keys.differences(spec)]
    if to == "hf":
        return hf.rules(spec, hf.HFDialect(**remembered) if remembered else hf.default_dialect(spec)), [
            *hf.differences(spec)
        ]
    if not isinstance(spec, ViTSpec):
        raise UsageError("torchvision has no BiT ResNets")
    dialect = torchvision_keys.TorchvisionDialect(**remembered)
    return torchvision_keys.rules(spec, dialect), [*torchvision_keys.differences(spec)]


def _unlike(spec: ModelSpec, theirs: Mapping[str, Any]) -> list[str]:
    ours = config.to_dict(spec)
    return [f"{key} is {value} there, {ours[key]} here" for key, value in theirs.items() if ours[key] != value]


def _write(bundle: Bundle, out: Path, to: Target, arrays: Mapping[str, Tensor]) -> None:
    fsio.make_folder(out.parent)
    if to in ("google-npz", "big-vision"):
        fsio.write_file(out, npz_bytes(arrays))
    elif to == "hf":
        with fsio.new_folder(out) as folder:
            folder.write("model.safetensors", safetensors_bytes(arrays, {"format": "pt"}))
            folder.write_json("config.json", hf.config_json(bundle.model.spec, bundle.labels))
            folder.write_json("preprocessor_config.json", hf.preprocessor_json(bundle.preprocess))
    else:
        fsio.write_file(out, safetensors_bytes(arrays, {"format": "pt"}))
