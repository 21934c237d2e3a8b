"""Changes to trained weights: new head, image size, patch size, channels.

Each operation takes a model and gives a new one; the old one is left as it was, and tensors that do not change are shared.
`operate` applies those that a person asked for to a whole bundle, so that labels and preprocessing change along.
Letters: O outputs, C channels, Y X kernel rows and columns, K classes, L tables, N patches, D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UnknownName, UsageError, require_choice, with_article
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import Model, allocate, build
from vitlab.models.cost import count_params
from vitlab.models.families import family_of
from vitlab.models.names import format_name, with_size
from vitlab.models.spec import GridResize, ModelSpec, Pair, PositionStart, Spec, ViTSpec
from vitlab.models.vit import Positions, ViT
from vitlab.weights.bundle import Bundle, load_state
from vitlab.weights.card import LICENCE, START, card_row, convert_command, write_card
from vitlab.weights.rules import PARTS

_MOST_PARAMS = 2**33  # twice ViT-e's, the largest size there is; a slip must not take all memory

AnyModel = TypeVar("AnyModel", bound=Model)


# --- one operation each -----------------------------------------------------------------------------------------------


def with_zero_head(model: AnyModel, classes: int) -> AnyModel:
    """A new linear head of zeros (paper section 3.2); 0 classes leave the head off."""
    spec = _possible(dataclasses.replace(model.spec, num_classes=classes))
    body = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    if not classes:
        return _made(model, spec, body)
    shapes = {name: tensor.shape for name, tensor in allocate(spec).state_dict().items() if name.startswith("head.")}
    like = next(iter(body.values()))
    return _made(model, spec, {**body, **{name: like.new_zeros(shape) for name, shape in shapes.items()}})


def with_classes(model: AnyModel, kept: Sequence[int]) -> AnyModel:
    """Only these classes, in this order; their logits stay what they were."""
    spec = dataclasses.replace(model.spec, num_classes=len(kept))
    state = dict(model.state_dict())
    index_K = torch.tensor(kept, device=state["head.weight"].device)
    return _made(model, spec, {**state, **{name: state[name][index_K] for name in ("head.weight", "head.bias")}})


def without_pre_logits(model: AnyModel) -> AnyModel:
    """Remove the layer between pooling and head; the head loses its meaning."""
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pre_logits.")}
    return _made(model, model.spec.with_linear_head(), kept)


def on_image_size(
    model: AnyModel, size: Pair, how: GridResize | None = None, positions: PositionStart = "interpolate", seed: int = 0
) -> AnyModel:
    """Put the position tables on the grid of another image size: resized as pictures are, or as `positions` says."""
    spec = _possible(dataclasses.replace(model.spec, image_size=size))
    model.spec.require_resizable(size)
    require_positions(spec, positions)
    with torch.no_grad():
        if positions == "interpolate" or not isinstance(model, ViT) or not isinstance(spec, ViTSpec):
            tables = model.resized_positions(spec.grid, how)
        else:
            tables = _other_positions(model, spec, positions, seed)
        return _made(model, spec, {**model.state_dict(), **tables})


def require_positions(spec: ModelSpec, positions: PositionStart) -> None:
    """Raise where there are no position tables that could start otherwise."""
    require_choice("init_positions", positions, get_args(PositionStart))
    has_tables = isinstance(spec, ViTSpec) and spec.pos in ("learned", "learned2d")
    if positions != "interpolate" and not has_tables:
        raise UsageError(
            f"init_positions={positions} is for learned position tables, and {format_name(spec)} has none here",
            hint="Leave init_positions out.",
        )


def _other_positions(model: ViT, spec: ViTSpec, positions: PositionStart, seed: int) -> dict[str, Tensor]:
    """Position tables for a new grid without 2-D interpolation; the class token keeps its slot.

    `sequence` takes the old rows in raster order, cut off or repeated from the start: row i of the new grid gets row i of the
    old one, wherever in the picture that was. `fresh` draws all of them anew.
    """
    new = Positions(spec)
    new.init_weights(torch.Generator().manual_seed(seed))
    tables: dict[str, Tensor] = {}
    for name, drawn_LND in new.named_parameters():
        old_LND: Tensor = getattr(model.pos, name)
        if name == "cls":
            tables[f"pos.{name}"] = old_LND
            continue
        slots = int(name == "table" and spec.uses_cls and spec.cls_in_pos)
        patches_LND = old_LND[:, slots:]
        index_N = torch.arange(drawn_LND.shape[1] - slots, device=old_LND.device) % patches_LND.shape[1]
        rows_LND = patches_LND[:, index_N] if positions == "sequence" else drawn_LND[:, slots:].to(old_LND)
        tables[f"pos.{name}"] = torch.cat([old_LND[:, :slots], rows_LND], dim=1)
    return tables


def with_patch(model: ViT, patch: int) -> ViT:
    """Resize the patch kernel by the pseudo-inverse (FlexiViT, Eq. 3), same grid.

    A patch and the same patch enlarged give the same embedding. The image grows or shrinks along, so that the positions stay.
    """
    spec = model.spec
    if spec.stem:
        raise UsageError("a hybrid's patches lie on the feature map of its stem and cannot be resized")
    if patch < 1:
        raise UsageError(f"a patch has at least 1 pixel, not {patch}")
    size = (spec.grid[0] * patch, spec.grid[1] * patch)
    new_spec = _possible(dataclasses.replace(spec, patch=patch, image_size=size))
    kernel_OCYX = model.embed.weight.detach()
    resize_qp = _resize_matrix(spec.patch, patch)
    # The least-squares answer to <x, w> = <resized x, w'> over all x; in double, because it inverts.
    inverse_qp = torch.linalg.pinv(resize_qp.T)
    flat_OCp = kernel_OCYX.double().cpu().flatten(2)
    resized = (flat_OCp @ inverse_qp.T).unflatten(2, (patch, patch)).to(kernel_OCYX)
    state = {**model.state_dict(), "embed.weight": resized}
    return _made(model, new_spec, state)


def with_channels(model: AnyModel, rule: Preprocess, channels: int) -> tuple[AnyModel, Preprocess]:
    """Adapt the first layer and the preprocessing to other input channels.

    To one channel: the kernels are added up, and where the channels were normalised differently the kernel and its bias are
    corrected, so that a grey image gives what it gave before. To more: the old kernels are repeated in turn and scaled by
    old/new, so that the sum stays as large as it was. A ResNet standardises its kernels and so loses their new scale: there
    both rules are a start for training, no equality.
    """
    if channels < 1:
        raise UsageError(f"a model has at least 1 input channel, not {channels}")
    old = model.spec.in_channels
    if 1 < channels < old:
        raise UsageError(f"cannot change {old} channels to {channels}: they are added up to 1, or repeated to more")
    spec = _possible(dataclasses.replace(model.spec, in_channels=channels))
    state, name = dict(model.state_dict()), family_of(spec).input_kernel(spec)
    bias = _bias_of(name)
    kernel_OCYX = state[name].double()
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (rule.mean, rule.std))
    if channels == 1:
        grey_mean, grey_std = float(mean.mean()), float(std.mean())
        per_unit = kernel_OCYX / std.to(kernel_OCYX)
        shift_O = (per_unit * (grey_mean - mean.to(kernel_OCYX))).sum(dim=(1, 2, 3))
        made = (per_unit * grey_std).sum(dim=1, keepdim=True)
        if bias in state:  # without padding, the shift is the same everywhere and joins the bias
            state[bias] = (state[bias].double() + shift_O).to(state[bias])
        new_rule = dataclasses.replace(rule, mode="L", mean=(grey_mean,), std=(grey_std,))
    else:
        turn = [c % old for c in range(channels)]
        made = kernel_OCYX[:, turn] * (old / channels)
        mode = "RGB" if channels == len("RGB") else "array"
        new_rule = dataclasses.replace(
            rule, mode=mode, mean=tuple(rule.mean[c] for c in turn), std=tuple(rule.std[c] for c in turn)
        )
    state[name] = made.to(state[name])
    return _made(model, spec, state), new_rule


def with_cls_position(model: ViT, wanted: bool) -> ViT:
    """Give the class token a position, or fold its position into the token.

    Folding adds the position to the token, which is what every forward pass does anyway; unfolding gives it a position of
    zeros. The model computes the same.
    """
    spec = model.spec
    if not spec.uses_cls or spec.pos != "learned" or spec.pos_at != "stem":
        raise UsageError(f"{format_name(spec)} has no learned class-token position at its stem to fold or unfold")
    if spec.cls_in_pos == wanted:
        return model
    state = dict(model.state_dict())
    table_1TD, cls_11D = state["pos.table"], state["cls"]
    if wanted:
        state["pos.table"] = torch.cat([torch.zeros_like(cls_11D), table_1TD], dim=1)
    else:
        state["cls"], state["pos.table"] = cls_11D + table_1TD[:, :1], table_1TD[:, 1:].clone()
    return _made(model, dataclasses.replace(spec, cls_in_pos=wanted), state)


def average(models: Sequence[AnyModel]) -> AnyModel:
    """Average several checkpoints of one model, in double."""
    first, *others = models
    for other in others:
        if other.spec != first.spec:
            raise UsageError(
                f"{format_name(first.spec)} and {format_name(other.spec)} differ, so no mean has a meaning"
            )
    states = [model.state_dict() for model in models]
    mean = {
        name: (sum((state[name].double() for state in states), torch.zeros(())) / len(states)).to(states[0][name])
        for name in states[0]
    }
    return _made(first, first.spec, mean)


def _possible(spec: Spec) -> Spec:
    """`spec`, unless no machine could hold it; asked before anything is made."""
    if (count := count_params(spec)) > _MOST_PARAMS:
        raise UsageError(f"the changed model would have {count:,} parameters, more than any ViT has")
    return spec


def _made(old: AnyModel, spec: ModelSpec, state: Mapping[str, Tensor]) -> AnyModel:
    made = load_state(allocate(spec), {name: tensor.detach() for name, tensor in state.items()}, "the changed model")
    assert isinstance(made, type(old))
    return made.train(old.training)


def _resize_matrix(old: int, new: int) -> Tensor:
    """The linear map of a bilinear resize from old x old to new x new pixels."""
    pixels = torch.eye(old * old, dtype=torch.float64).reshape(-1, 1, old, old)
    return F.interpolate(pixels, size=(new, new), mode="bilinear", antialias=True).flatten(1).T


def _single(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).clone()


def _bias_of(kernel: str) -> str:
    """Where the input layer keeps its bias. Padded and standardised convolutions have none."""
    return kernel.removesuffix("weight") + "bias"


# --- for a transfer ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """What happened to each tensor of the old model, for the one line a person reads."""

    kept: int
    resized: str | None
    dropped: tuple[str, ...]
    classes: str
    added: int = 0

    def __str__(self) -> str:
        grid = f"; grid {self.resized}" if self.resized else ""
        gone = f"; {' and '.join(self.dropped)} replaced by a zero head, {self.classes}" if self.dropped else ""
        new = f"; {self.added} tensors of parts that are new in the model start fresh" if self.added else ""
        return f"{self.kept} tensors kept{gone}{new}{grid}"


def may_differ(spec: ModelSpec) -> tuple[str, ...]:
    """Fields in which a model may differ from the weights that it starts from."""
    family = family_of(spec)
    return ("image_size", "num_classes", *family.free_fields, *family.dropout_fields)


def require_same_body(old: ModelSpec, new: ModelSpec) -> None:
    """Raise if weights of `old` cannot initialise a model of `new`."""
    if old.kind != new.kind:
        raise UsageError(
            f"the start weights are {with_article(format_name(old))}, but the recipe says {format_name(new)}"
        )
    old = family_of(new).grown(old, new)
    for field in dataclasses.fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name not in may_differ(new) and before != after:
            key, theirs, ours = _difference(f"model.{field.name}", before, after)
            raise UsageError(f"the start weights have {key} = {theirs}, but the recipe says {ours}")
    old.require_resizable(new.image_size)


def _difference(key: str, before: object, after: object) -> tuple[str, object, object]:
    """Where two unequal values differ first, as a key of a recipe, and what each has there: of a table, one field."""
    if type(before) is type(after) and dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            pair = getattr(before, field.name), getattr(after, field.name)
            if pair[0] != pair[1]:
                return _difference(f"{key}.{field.name}", *pair)
    theirs, ours = (list(value) if isinstance(value, tuple) else value for value in (before, after))
    return key, theirs, ours


def for_transfer(
    model: AnyModel, spec: ModelSpec, positions: PositionStart = "interpolate", seed: int = 0
) -> tuple[AnyModel, TransferReport]:
    """A model for the next task: old body, zero head, positions on the new grid.

    `spec` may differ from the old one in image size, classes and regularisation; the body must be the same, but for parts that
    start as the identity. `positions` says what becomes of position tables, and `seed` is of what is drawn. Nothing is shared
    with the old model, which stays usable.
    """
    old = model.spec
    require_same_body(old, spec)
    how: GridResize | None = getattr(spec, "pos_resize", None)  # None where there are no positions
    body = without_pre_logits(on_image_size(model, spec.image_size, how, positions, seed))
    state = {name: _single(tensor) for name, tensor in with_zero_head(body, spec.num_classes).state_dict().items()}
    kept = sum(not name.startswith("head.") for name in state)
    new = spec.with_linear_head()
    added = {name: tensor for name, tensor in _added(model.spec, new, seed).items() if name not in state}
    made = _made(model, new, {**state, **added})
    dropped = tuple(sorted({name.split(".")[0] for name in model.state_dict() if name.startswith(PARTS)}))
    classes = f"{old.num_classes} -> {spec.num_classes}"
    return made.train(), TransferReport(kept, _grid_change(old, spec, how, positions), dropped, classes, len(added))


def _added(old: ModelSpec, new: ModelSpec, seed: int) -> dict[str, Tensor]:
    """A fresh state of the new model where it has parts that the old one lacks; building it costs what a model costs."""
    return {} if family_of(new).grown(old, new) == old else dict(build(new, seed=seed).state_dict())


def _grid_change(
    old: ModelSpec, new: ModelSpec, how: GridResize | None, positions: PositionStart = "interpolate"
) -> str | None:
    if not isinstance(old, ViTSpec) or old.pos not in ("learned", "learned2d"):
        return None
    if positions == "fresh":
        return f"{new.grid[0]}x{new.grid[1]}, positions drawn anew"
    if old.grid == new.grid:
        return None
    rule = "positions in sequence, not interpolated" if positions == "sequence" else how or old.pos_resize
    return f"{old.grid[0]}x{old.grid[1]} -> {new.grid[0]}x{new.grid[1]}, {rule}"


# --- what a person asks for -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """The surgery of `vitlab convert`; None or empty means no change."""

    drop: tuple[str, ...] = ()  # of PARTS
    classes: int | None = None
    labels: tuple[str, ...] = ()
    image_size: int | Sequence[int] | None = None
    pos_resize: GridResize | None = None
    patch_size: int | None = None
    channels: int | None = None
    cls_in_pos: bool | None = None

    def __post_init__(self) -> None:
        if self.pos_resize is not None:
            require_choice("pos_resize", self.pos_resize, get_args(GridResize))
        if self.classes is not None and self.labels:
            raise UsageError("classes makes a new head and labels keeps a part of the old one; give one of them")
        if self.classes is not None and self.classes < 0:
            raise UsageError(f"classes must not be negative, not {self.classes}")
        if "head" in self.drop and (self.classes is not None or self.labels):
            raise UsageError("drop=head, classes and labels exclude each other; give one of them")
        if self.pos_resize is not None and self.image_size is None and self.patch_size is None:
            raise UsageError("pos_resize says how positions get to another grid; give image_size or patch_size too")


def operate(
    bundle: Bundle, changes: Changes, source: str = "a model", done: Sequence[str] = ()
) -> tuple[Bundle, list[str]]:
    """Apply the requested changes to a bundle; returns it with one note for each.

    What was fitted to the model as it was does not hold any longer: its temperature, its thresholds (0 is an even chance) and
    the numbers of its card, which is written anew for what came of `source`.
    """
    notes = list(done)
    for step in (_change_head, _change_size, _change_channels, _change_cls_position):
        bundle = step(bundle, changes, notes)
    if not notes:
        return bundle, notes
    if bundle.temperature != 1 or any(bundle.thresholds):
        notes.append("temperature and thresholds reset: they were fitted to the model as it was")
    even = (0.0,) * len(bundle.labels) if bundle.thresholds else ()
    card = write_card(
        title=f"{source}, changed",
        spec=bundle.model.spec,
        data="that of the source",
        command=convert_command(source),
        metrics={"changed": "; ".join(notes)},
        start=card_row(bundle.card, START),
        licence=card_row(bundle.card, LICENCE) or "that of the source",
    )
    return dataclasses.replace(bundle, card=card, recipe="", temperature=1.0, thresholds=even), notes


def _change_head(bundle: Bundle, changes: Changes, notes: list[str]) -> Bundle:
    model, labels = bundle.model, bundle.labels
    before = model.spec.num_classes
    if "head" in changes.drop and not before:
        raise UsageError(f"{format_name(model.spec)} has no head to leave out")
    if "pre_logits" in changes.drop:
        if model.spec == model.spec.with_linear_head():
            raise UsageError(f"{format_name(model.spec)} has no pre_logits to leave out")
        model = without_pre_logits(model)
        notes.append("pre_logits left out: the head was trained behind it and means nothing without it")
    if changes.labels:
        kept = [_class_index(label, labels) for label in changes.labels]
        if len(set(kept)) != len(kept):
            raise UsageError("labels names a class twice")
        model, labels = with_classes(model, kept), tuple(labels[k] for k in kept)
        notes.append(f"head kept for {len(kept)} of {before} classes")
    elif changes.classes:
        model, labels = with_zero_head(model, changes.classes), tuple(str(k) for k in range(changes.classes))
        notes.append(f"head replaced {before} -> {changes.classes}, zeros")
    elif before and (changes.classes == 0 or "head" in changes.drop):
        model, labels = with_zero_head(model, 0), ()
        notes.append(f"head of {before} classes left out")
    return dataclasses.replace(bundle, model=model, labels=labels)


def _change_size(bundle: Bundle, changes: Changes, notes: list[str]) -> Bundle:
    """Change image size, patch size and positions, and the preprocessing along."""
    model, rule = bundle.model, bundle.preprocess
    before, image_size = model.spec, changes.image_size
    if changes.pos_resize is not None and not isinstance(model, ViT):
        raise UsageError(f"{format_name(before)} has no positions")
    if changes.patch_size is not None:
        if not isinstance(model, ViT) or not isinstance(before, ViTSpec):
            raise UsageError(f"{format_name(before)} has no patches")
        model = with_patch(model, changes.patch_size)
        notes.append(f"patch {model.spec.patch} pixels, by the pseudo-inverse of the bilinear resize")
        # Pictures keep their size where the new patch divides it, as in FlexiViT; then it is the grid that changes.
        if image_size is None and not any(side % changes.patch_size for side in (*before.image_size, *rule.image_size)):
            image_size = before.image_size
        elif image_size is None:
            fed = before.grid_for(rule.image_size)
            rule = dataclasses.replace(rule, image_size=(fed[0] * changes.patch_size, fed[1] * changes.patch_size))
    if image_size is not None:
        model = on_image_size(model, with_size(model.spec, image_size=image_size).image_size, changes.pos_resize)
    if changes.image_size is not None:
        rule = dataclasses.replace(rule, image_size=model.spec.image_size)
    if grid := _grid_change(before, model.spec, changes.pos_resize):
        notes.append(f"grid {grid}")
    old, new = bundle.preprocess.image_size, rule.image_size
    if old != new:
        notes.append(f"images {old[0]}x{old[1]} -> {new[0]}x{new[1]}")
    return dataclasses.replace(bundle, model=model, preprocess=rule)


def _change_channels(bundle: Bundle, changes: Changes, notes: list[str]) -> Bundle:
    before, after = bundle.model.spec.in_channels, changes.channels
    if after is None or after == before:
        return bundle
    model, rule = with_channels(bundle.model, bundle.preprocess, after)
    how = "added up" if after == 1 else "repeated in turn and scaled to the same sum"
    exact = _bias_of(family_of(model.spec).input_kernel(model.spec)) in model.state_dict()
    notes.append(f"channels {before} -> {after}, kernels {how}{'' if exact else '; not exact here, so fine-tune it'}")
    return dataclasses.replace(bundle, model=model, preprocess=rule)


def _change_cls_position(bundle: Bundle, changes: Changes, notes: list[str]) -> Bundle:
    if changes.cls_in_pos is None:
        return bundle
    if not isinstance(bundle.model, ViT):
        raise UsageError(f"{format_name(bundle.model.spec)} has no class token")
    model = with_cls_position(bundle.model, changes.cls_in_pos)
    if model is not bundle.model:
        notes.append(f"class-token position {'split off, as zeros' if changes.cls_in_pos else 'folded into the token'}")
    return dataclasses.replace(bundle, model=model)


def _class_index(label: str, labels: Sequence[str]) -> int:
    """The class of this name, or of this number where no class has it as its name."""
    found = [k for k, name in enumerate(labels) if name == label]
    if len(found) > 1:
        raise UsageError(f"'{label}' names {len(found)} classes: {', '.join(map(str, found))}", hint="Give the number.")
    if found:
        return found[0]
    if label.isdecimal() and int(label) < len(labels):
        return int(label)
    raise UnknownName("label", label, labels)
