"""Anybody's weights in, anybody's weights out: finds out what a file is, and accounts for every array in it.

Owns the meeting of container, format and preprocessing. The formats know names, the containers know bytes; nothing is guessed
from a file's name, and every assumption is a note that the caller shows.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.console import Advance, Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Mode, Preprocess
from vitlab.models.build import allocate
from vitlab.models.names import format_name
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec
from vitlab.weights.bundle import Bundle, load_state, require_finite, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.containers import ArrayFile, npz_chunks, read_arrays, safetensors_chunks
from vitlab.weights.formats import bit, dinov2, google, hf, hf_settings, timm_keys, timm_settings, torchvision_keys
from vitlab.weights.rules import Rule, bring_in, link, send_out
from vitlab.weights.surgery import PARTS

Target = Literal["vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision"]
TARGETS: tuple[Target, ...] = ("vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision")
_WORTH_SHOWING = 300e6  # bytes; what is smaller is written before a bar would be drawn
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
        total = self.matched + len(self.unexpected)
        said = [f"{self.source}: {self.model}, {self.matched} of {total} arrays matched, none missing"]
        if self.unexpected:
            said.append(f"left out: {', '.join(self.unexpected)}")
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
    assumptions: Callable[[ModelSpec, Mapping[str, Any] | None], tuple[str, ...]] = lambda _, __: ()


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
        assumptions=timm_keys.assumptions,
    ),
    _Format(
        "hf",
        hf.recognises,
        hf.read_spec,
        lambda spec, arrays: hf.rules(spec, hf.read_dialect(arrays)),
        hf.read_dialect,
        hf.leftovers,
        hf.assumptions,
    ),
    _Format(
        "torchvision",
        torchvision_keys.recognises,
        torchvision_keys.read_spec,
        lambda spec, arrays: torchvision_keys.rules(spec, torchvision_keys.read_dialect(arrays)),
        torchvision_keys.read_dialect,
        assumptions=torchvision_keys.assumptions,
    ),
    _Format(
        "dinov2",
        dinov2.recognises,
        dinov2.read_spec,
        lambda spec, _: dinov2.rules(spec),
        lambda _: None,
        dinov2.leftovers,
        dinov2.assumptions,
    ),
)


# --- in ---------------------------------------------------------------------------------------------------------------


def read_foreign(
    path: Path,
    *,
    drop: Sequence[str] = (),
    trust_pickle: bool = False,
    part: str | None = None,
    preprocess: str | Preprocess | None = None,
) -> tuple[Bundle, ConvertReport]:
    """Any supported file or transformers folder as a bundle in memory, with the account of its arrays.

    `drop` names arrays to leave out, as shell patterns; a leftover that nobody named is an error, and so is a name that
    nothing has. `part` picks one of several models in a torch file, such as its moving average. `preprocess` is told where
    the file does not: a `preprocess.json`, or one of PREPROCESSINGS.
    """
    weights, settings, preprocessor = _find_parts(path)
    found = _read_all(weights, trust_pickle, part)
    origin = str(path)
    arrays = {name: array for name, array in found.arrays.items() if not _is_dropped(name, drop)}
    dropped = found.arrays.keys() - arrays.keys()
    if bit.recognises(arrays):
        arrays = bit.plain_names(arrays)
    chosen = _recognise(arrays, origin)
    for pattern in drop:
        if pattern not in PARTS and not any(_is_dropped(name, [pattern]) for name in found.arrays):
            raise UsageError(f"{origin} has nothing called '{pattern}' to leave out")
    left = {*chosen.leftovers(arrays), *dropped}
    arrays = {name: array for name, array in arrays.items() if name not in left}
    spec = chosen.read_spec(arrays, origin, settings)
    told, matched = _origin(chosen, found, arrays), len(arrays)
    links = link(chosen.rules(spec, arrays), spec, chosen.name)
    del found  # it would keep the arrays that `bring_in` lets go
    state = bring_in(links, arrays, spec, origin)
    require_finite(state)
    notes: list[str] = []
    if isinstance(preprocess, Preprocess):
        rule = preprocess
    elif preprocess is not None:
        rule = _named_preprocess(preprocess, spec)
    else:
        rule, notes = _read_preprocess(chosen.name, spec, settings, preprocessor)
    labels, said = _read_labels(chosen.name, settings, spec)
    notes += [*([said] if said else []), *chosen.assumptions(spec, settings)]
    if chosen.name == "dinov2" and isinstance(spec, ViTSpec):
        notes += dinov2.differences(spec)
    if spec.num_classes and not state["head.weight"].any():
        notes.append("The head is all zeros: this checkpoint is for fine-tuning, not for predicting.")
    model = load_state(allocate(spec), state, origin).eval()
    bundle = Bundle(model, rule, labels, _card(path, spec, told["format"]), told)
    report = ConvertReport(
        told["format"], "vitlab", format_name(spec), matched, (), tuple(sorted(left)), (), tuple(notes)
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
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith((f"{pattern}/", f"{pattern}.")) for pattern in drop
    )


def _find_parts(path: Path) -> tuple[list[Path], dict[str, Any] | None, dict[str, Any] | None]:
    """The weights, and the settings and preprocessing that lie beside them in a folder. Large models are several files."""
    if not path.is_dir():
        return [path], None, None
    index = _read_json(path / hf_settings.INDEX)
    shards = () if index is None else hf_settings.read_index(index, str(path / hf_settings.INDEX))
    for names in (["model.safetensors"], ["pytorch_model.bin"], shards):
        if names and all((path / name).is_file() for name in names):
            beside = _read_json(path / "config.json"), _read_json(path / "preprocessor_config.json")
            return [path / name for name in names], *beside
    raise FileProblem(f"{path} holds no weights", hint="Looked for a bundle, model.safetensors and pytorch_model.bin.")


def _read_all(paths: Sequence[Path], trust_pickle: bool, part: str | None) -> ArrayFile:
    first, *others = (read_arrays(path, trust_pickle=trust_pickle, part=part) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        if twice := first.arrays.keys() & other.arrays.keys():
            raise FileProblem(f"{path} holds {min(twice)}, as does another file of the model")
        if first.prefix != other.prefix:
            raise FileProblem(f"{path} begins its names otherwise than the other files of the model")
        first.arrays.update(other.arrays)
    return first


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
        return hf_settings.read_preprocess(preprocessor), []
    if name == "timm" and settings is not None and "pretrained_cfg" in settings:
        return timm_settings.read_preprocess(settings["pretrained_cfg"]), []
    mode, size = _mode(spec), spec.image_size
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


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", hf_settings.INDEX)  # what a transformers folder is known by
PREPROCESSINGS = ("minus-one-to-one", "imagenet")


def _named_preprocess(text: str, spec: ModelSpec) -> Preprocess:
    """A `preprocess.json`, the paper's -1...1, or ImageNet's mean and deviation with the usual central crop."""
    if text == "minus-one-to-one":
        half = (0.5,) * spec.in_channels
        return Preprocess(mode=_mode(spec), image_size=spec.image_size, mean=half, std=half)
    if text == "imagenet" and spec.in_channels == len("RGB"):
        size = spec.image_size
        return Preprocess(image_size=size, resize="shorter-side", crop_frac=0.875, filter="bicubic", **_IMAGENET)
    if (table := _read_json(Path(text))) is None:
        raise UsageError(
            f"'{text}' is no preprocessing for {spec.in_channels} channels",
            hint=f"Give a preprocess.json, or one of: {', '.join(PREPROCESSINGS)}.",
        )
    return config.from_dict(Preprocess, table, "preprocess.")


def _mode(spec: ModelSpec) -> Mode:
    return "L" if spec.in_channels == 1 else "RGB" if spec.in_channels == len("RGB") else "array"


def _read_labels(name: str, settings: dict[str, Any] | None, spec: ModelSpec) -> tuple[tuple[str, ...], str | None]:
    read = timm_settings.read_labels if name == "timm" else hf_settings.read_labels
    return read(settings or {}, spec.num_classes)


def _origin(chosen: _Format, found: ArrayFile, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    dialect = chosen.dialect(arrays)
    told = {} if dialect is None else dataclasses.asdict(dialect)
    name = "big-vision" if told.get("big_vision") else chosen.name  # as `--to` calls it, so that it is found again
    return {"format": name, "dialect": told, "prefix": found.prefix, "container": found.container}


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


def write_foreign(bundle: Bundle, out: Path, to: Target, console: Console | None = None) -> ConvertReport:
    """Writes the bundle's weights in another format; what that format cannot hold is an error, never left out."""
    large = sum(tensor.nbytes for tensor in bundle.model.state_dict().values()) > _WORTH_SHOWING
    console = console if console and large else Console(quiet=True)
    fsio.require_free(out)
    spec = bundle.model.spec
    notes: list[str] = []
    if to == "vitlab":
        with console.progress("write", len(bundle.model.state_dict())) as advance:
            save_bundle(out, bundle, advance)
        matched = len(bundle.model.state_dict())
    else:
        rules, notes = _target_rules(spec, bundle, to)
        arrays = send_out(link(rules, spec, to), bundle.model.state_dict())
        arrays = {
            str(bundle.origin.get("prefix", "")) * (bundle.origin.get("format") == to) + k: v for k, v in arrays.items()
        }
        matched = len(arrays)
        with console.progress("write", matched) as advance:
            _write(bundle, out, to, arrays, advance)
    return ConvertReport("vitlab", to, format_name(spec), matched, (), (), (), tuple(notes), str(out))


def _target_rules(spec: ModelSpec, bundle: Bundle, to: Target) -> tuple[list[Rule], list[str]]:
    remembered: dict[str, Any] = bundle.origin.get("dialect", {}) if bundle.origin.get("format") == to else {}
    if isinstance(spec, BiTSpec) and to in ("google-npz", "big-vision"):
        return bit.rules(spec), []
    if to in ("google-npz", "big-vision"):
        assert isinstance(spec, ViTSpec)
        # All files that Google published have the names of the first code, before linen.
        usual = {"big_vision": to == "big-vision", "pre_linen": to == "google-npz"}
        dialect = _dialect(google.GoogleDialect, {**usual, **remembered})
        if spec.uses_cls and spec.cls_in_pos == dialect.big_vision:
            raise UsageError(
                f"{to} {'has no place for the' if dialect.big_vision else 'needs a'} class token's position",
                hint=f"Add --{'no-' * dialect.big_vision}cls-in-pos: the model computes the same.",
            )
        return google.rules(spec, dialect), _unlike(spec, {"gelu": "tanh", "norm_eps": 1e-6})
    if to == "timm":
        arguments = timm_keys.create_args(spec)
        told = [] if arguments is None else [f"timm needs: create_model(**{arguments})"]
        told += filter(None, [timm_settings.preprocess_difference(bundle.preprocess)])
        rules = timm_keys.rules(spec, _dialect(timm_keys.TimmDialect, remembered))
        return rules, [*told, *timm_keys.differences(spec)]
    if to == "hf":
        dialect = _dialect(hf.HFDialect, remembered) if remembered else hf.default_dialect(spec)
        told = filter(None, [hf_settings.preprocess_difference(bundle.preprocess)])
        return hf.rules(spec, dialect), [*told, *hf.differences(spec)]
    if not isinstance(spec, ViTSpec):
        raise UsageError("torchvision has no BiT ResNets")
    dialect = _dialect(torchvision_keys.TorchvisionDialect, remembered)
    return torchvision_keys.rules(spec, dialect), [*torchvision_keys.differences(spec)]


_Dialect = TypeVar("_Dialect")


def _dialect(kind: type[_Dialect], remembered: dict[str, Any]) -> _Dialect:
    """What a bundle remembers came from a file, and is checked like one."""
    return config.from_dict(kind, remembered, "origin.dialect.")


def _unlike(spec: ModelSpec, theirs: Mapping[str, Any]) -> list[str]:
    ours = config.to_dict(spec)
    return [f"{key} is {value} there, {ours[key]} here" for key, value in theirs.items() if ours[key] != value]


def _write(bundle: Bundle, out: Path, to: Target, arrays: Mapping[str, Tensor], advance: Advance) -> None:
    fsio.make_folder(out.parent)
    if to in ("google-npz", "big-vision"):
        fsio.write_file(out, npz_chunks(arrays, advance))
        return
    weights = safetensors_chunks(arrays, {"format": "pt"}, advance)
    if to == "hf":
        with fsio.new_folder(out) as folder:
            folder.write("model.safetensors", weights)
            folder.write_json("config.json", hf_settings.config_json(bundle.model.spec, bundle.labels))
            folder.write_json("preprocessor_config.json", hf_settings.preprocessor_json(bundle.preprocess))
    elif to == "timm" and not out.suffix:
        with fsio.new_folder(out) as folder:
            folder.write("model.safetensors", weights)
            settings = timm_settings.config_json(bundle.model.spec, bundle.preprocess, bundle.labels)
            folder.write_json("config.json", settings)
    else:
        fsio.write_file(out, weights)
