"""Saliency maps: which patches a score of the model depends on, by five methods.

    target = Target.classes(torch.tensor([3, 5]))
    heat_BYX = saliency(model, x_BCYX, "gradient-rollout", target)

A map is float32 on the patch grid, at least 0, in units of its own method. None of them is a proof: `faithfulness.py` says
whether one means anything. Letters: B batch, C channels, Y X rows and columns, T tokens, D width, H heads, K classes.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, assert_never, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError, require_choice
from vitlab.inspection.attention import images_at_once, require_vit
from vitlab.inspection.rollout import on_grid, output_row, rollout_rows
from vitlab.models.cost import activation_bytes
from vitlab.models.model import Model, StageModel
from vitlab.models.results import require_images, resolve_indices
from vitlab.models.spec import ModelSpec
from vitlab.models.tape import Tape
from vitlab.models.vit import Block, ViT

Method = Literal["attention", "rollout", "gradient-rollout", "grad-cam", "integrated-gradients"]
METHODS: tuple[Method, ...] = get_args(Method)
_OF_TOKENS = ("attention", "rollout", "gradient-rollout")  # these follow weights from token to token
# Gradients per image of integrated gradients. With DINOv2 ViT-S/14 the order of the patches correlates with that of 48 by 0.7
# to 0.9, and the curves of deletion and insertion are as good as with 16.
STEPS = 8

_MOST_ACTIVATIONS = 2**28  # kept for the backward pass at once: about 1 GB
_MOST_BYTES = 2**30  # the same, of a model that is not a ViT, and
_IMAGES_AT_ONCE = 8  # of such a model at most


def methods_of(spec: ModelSpec) -> tuple[Method, ...]:
    """The methods that a model has maps by; the first three need a sequence of tokens."""
    return tuple(method for method in METHODS if spec.has_attention_maps or method not in _OF_TOKENS)


@dataclasses.dataclass(frozen=True)
class Target:
    """The number per image that is explained: a class's logit, or the image's own representation.

    Models without a head have no classes. Their score is the length of the representation along that of the unchanged image.
    """

    index_B: Tensor | None = None  # classes
    unit_BD: Tensor | None = None  # of length 1
    several: bool = False  # whether an image can have several classes, each with a probability of its own

    @staticmethod
    def classes(index_B: Tensor | Sequence[int], *, several: bool = False) -> "Target":
        """The logit of one class per image."""
        with torch.inference_mode(False):  # else autograd could not use it
            return Target(index_B=torch.as_tensor(index_B).clone().long(), several=several)

    @staticmethod
    def own(model: Model, x_BCYX: Tensor) -> "Target":
        """The representation along the direction that it has for these images."""
        with torch.inference_mode(False), torch.no_grad():
            y_BD = model.represent(x_BCYX.clone())
            return Target(unit_BD=F.normalize(y_BD.to(torch.promote_types(y_BD.dtype, torch.float32)), dim=1))

    @staticmethod
    def of(model: Model, x_BCYX: Tensor) -> "Target":
        """The class that the model answers; without a head, `own`."""
        if model.head is None:
            return Target.own(model, x_BCYX)
        with torch.inference_mode(False), torch.no_grad():
            return Target.classes(model(x_BCYX.clone()).argmax(dim=1))

    def for_model(self, model: Model, x_BCYX: Tensor) -> "Target":
        """The same question to another model: the same classes, but that model's own representations."""
        return self if self.index_B is not None else Target.own(model, x_BCYX)

    def score(self, model: Model, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """The number that is explained, [B]."""
        return self._pick(self._output(model, x_BCYX, tape))

    def normalised_score(self, model: Model, x_BCYX: Tensor) -> Tensor:
        """The class's probability, or the cosine with the unchanged representation, [B].

        By softmax; by sigmoid where an image can have several classes.
        """
        y_BK = self._output(model, x_BCYX, None)
        if self.index_B is None:
            return self._pick(F.normalize(y_BK, dim=1))
        return self._pick(y_BK.sigmoid() if self.several else y_BK.softmax(dim=1))

    def part(self, rows: slice) -> "Target":
        """The targets of some of the images."""
        given = (None if each is None else each[rows] for each in (self.index_B, self.unit_BD))
        return Target(*given, several=self.several)

    def require_fit(self, model: Model, x_BCYX: Tensor) -> None:
        """Raise unless there is one valid target for each image."""
        require_images(x_BCYX, model.spec.in_channels)
        given = self.index_B if self.index_B is not None else self.unit_BD
        if given is None or len(given) != len(x_BCYX):
            raise UsageError(f"a target needs one class or direction for each of the {len(x_BCYX)} images")
        if self.index_B is None:
            return
        if model.head is None:
            raise UsageError("this model has no classes to explain", hint="Use Target.own(model, images).")
        if int(self.index_B.min()) < 0 or int(self.index_B.max()) >= model.spec.num_classes:
            raise UsageError(
                f"classes are numbered from 0 to {model.spec.num_classes - 1}, not {self.index_B.tolist()}"
            )

    def _output(self, model: Model, x_BCYX: Tensor, tape: Tape | None) -> Tensor:
        y_BK = model.represent(x_BCYX, tape) if self.index_B is None else model(x_BCYX, tape)
        return y_BK.to(torch.promote_types(y_BK.dtype, torch.float32))  # half types would round scores

    def _pick(self, y_BK: Tensor) -> Tensor:
        if self.index_B is not None:
            return y_BK.gather(1, self.index_B.to(y_BK.device)[:, None])[:, 0]
        assert self.unit_BD is not None
        return (y_BK * self.unit_BD.to(y_BK.device)).sum(dim=1)


def saliency(
    model: Model,
    x_BCYX: Tensor,
    method: Method,
    target: Target | None = None,
    *,
    layer: int = -1,
    steps: int = STEPS,
    chunk: int | None = None,
) -> Tensor:
    """Heat of every patch, [B, Y, X], by one of `METHODS`.

    Args:
        model: A ViT, plain, hybrid or axial; of others there are maps by `methods_of(model.spec)`. In `eval()` mode, on the
            images' device.
        x_BCYX: Normalised images.
        method: `attention`: the output's row of one layer's weights, mean of heads. `rollout`: of all layers' product. Neither
            knows the target. `gradient-rollout`, `grad-cam`, `integrated-gradients`: see the functions of these names.
        target: What is explained; default: the class that the model answers, or its own representation without a head.
        layer: Of `attention` and `grad-cam`, by the number of the block; in a CNN, of the stage, whose grid the map is on.
        steps: Of `integrated-gradients`.
        chunk: Images at a time; default: as many as fit in about 1 GB.
    """
    require_choice("method", method, METHODS)
    target = target or Target.of(model, x_BCYX)
    target.require_fit(model, x_BCYX)
    match method:
        case "attention":
            heat_BYX = attention_rows(model, x_BCYX, layer=layer, chunk=chunk)
        case "rollout":
            heat_BYX = rollout_rows(model, x_BCYX, chunk=chunk)
        case "gradient-rollout":
            heat_BYX = gradient_rollout(model, x_BCYX, target, chunk=chunk)
        case "grad-cam":
            heat_BYX = grad_cam(model, x_BCYX, target, layer=layer, chunk=chunk)
        case "integrated-gradients":
            pixels_BCYX = integrated_gradients(model, x_BCYX, target, steps=steps, chunk=chunk)
            # The size of the sum: a sum of sizes shows where the image has detail, with random weights as with trained ones.
            heat_BYX = patch_sums(pixels_BCYX.sum(dim=1), model).abs()
        case _:
            assert_never(method)
    return heat_BYX.float()


def attention_rows(model: Model, x_BCYX: Tensor, *, layer: int = -1, chunk: int | None = None) -> Tensor:
    """The output's row of one layer's weights, mean of heads, on the patch grid.

    The class token's; without one, the mean of the patches' rows; of attention pooling at the last layer, the pooling's own.
    """
    vit = require_vit(model)
    (index,) = resolve_indices([layer], vit.spec.num_blocks, "layer")
    last = index == vit.spec.num_blocks - 1
    rows: list[Tensor] = []
    for x_part in x_BCYX.split(chunk or images_at_once(vit, x_BCYX)):
        if vit.spec.pool == "map" and last:
            rows.append(vit.pooling_weights(x_part).mean(dim=1))
            continue
        queries = "cls" if vit.spec.uses_cls else "patches"
        ((_, weights_BHQT),) = vit.attention_layers(x_part, layers=[index], queries=queries)
        rows.append(weights_BHQT.mean(dim=(1, 2)))
    return on_grid(vit, x_BCYX, torch.cat(rows))


def gradient_rollout(model: Model, x_BCYX: Tensor, target: Target, *, chunk: int | None = None) -> Tensor:
    """Rollout of the weights that raise the score, on the patch grid.

    Of every layer the mean over heads of relu(A * dScore/dA), A the softmax weights: the rule of Chefer et al. (2021, "Generic
    attention-model explainability"), where vit-explain cuts off negative values after the mean. The identity is added, each row
    divided by its sum, and the layers multiplied; the output's row is read as in `rollout`. Gradients are large or small as
    the score is, so the identity weighs more where the score hardly depends on attention.
    """
    vit = require_vit(model)
    grid = vit.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    names = [f"block{i:02d}/{part}" for i in range(vit.spec.num_blocks) for part in ("norm1", "attn")]
    rows: list[Tensor] = []
    for part in _parts(vit, x_BCYX, chunk):
        tape = Tape(*names)
        gradients = _gradients(vit, x_BCYX[part], target.part(part), tape, names[1::2])
        rolled_BTT: Tensor | None = None
        for i, block in enumerate(vit.blocks):
            assert isinstance(block, Block)
            relevance_BTT = _relevance(block, tape.pop(names[2 * i]).detach(), gradients[i], grid)
            rolled_BTT = relevance_BTT if rolled_BTT is None else relevance_BTT @ rolled_BTT
        assert rolled_BTT is not None
        rows.append(output_row(vit, x_BCYX[part], rolled_BTT, layers=vit.spec.num_blocks))
    return on_grid(vit, x_BCYX, torch.cat(rows))


def grad_cam(model: Model, x_BCYX: Tensor, target: Target, *, layer: int = -1, chunk: int | None = None) -> Tensor:
    """Grad-CAM (Selvaraju et al. 2017) on the patches that enter a block, on the patch grid.

    relu of the sum over channels of activation times the gradient's mean over patches. Taken after the first norm of the last
    block: with a class token, what comes out of that block's patches no longer reaches the head, and has a gradient of zero.
    In a CNN it is the feature map that a stage gives, as in the paper of Grad-CAM.
    """
    if isinstance(model, StageModel):
        return _stage_cam(model, x_BCYX, target, layer, chunk)
    vit = require_vit(model)
    (index,) = resolve_indices([layer], vit.spec.num_blocks, "layer")
    name = f"block{index:02d}/norm1"
    rows: list[Tensor] = []
    for part in _parts(vit, x_BCYX, chunk):
        tape = Tape(name)
        (gradient_BTD,) = _gradients(vit, x_BCYX[part], target.part(part), tape, [name])
        weight_B1D = gradient_BTD[:, vit.spec.num_prefix :].mean(dim=1, keepdim=True)
        rows.append((tape[name].detach() * weight_B1D).sum(dim=2).relu())
    return on_grid(vit, x_BCYX, torch.cat(rows))


def _stage_cam(model: StageModel, x_BCYX: Tensor, target: Target, stage: int, chunk: int | None) -> Tensor:
    (index,) = resolve_indices([stage], model.spec.num_blocks, "stage")
    name = model.stage_maps[index]
    parts: list[Tensor] = []
    for part in _parts(model, x_BCYX, chunk):
        tape = Tape(name)
        (gradient_BCYX,) = _gradients(model, x_BCYX[part], target.part(part), tape, [name])
        weight_BC11 = gradient_BCYX.mean(dim=(2, 3), keepdim=True)
        parts.append((tape[name].detach() * weight_BC11).sum(dim=1).relu())
    return torch.cat(parts)


def integrated_gradients(
    model: Model,
    x_BCYX: Tensor,
    target: Target,
    *,
    baseline: Tensor | None = None,
    steps: int = STEPS,
    chunk: int | None = None,
) -> Tensor:
    """Integrated gradients (Sundararajan et al. 2017) of every pixel and channel, [B, C, Y, X].

    The path runs straight from the `baseline` to the image; its integral is taken by Gauss-Legendre quadrature, which needs far
    fewer gradients than equal steps. The attributions sum to score(image) - score(baseline), up to the error of that: the order
    of the patches settles with few steps, their sum only with many where the score is a rough function.
    The default baseline is the image `blurred`, so that detail is explained. From a plain colour, the path would lead through
    the same image at all contrasts, to which a hybrid's norms are blind, and other models nearly so: hardly anything would
    change but at its very beginning.
    """
    if steps < 1:
        raise UsageError(f"integrated gradients need at least 1 step, not {steps}")
    baseline = blurred(x_BCYX, model.spec.stride) if baseline is None else baseline
    start_BCYX = baseline.to(x_BCYX).expand_as(x_BCYX)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    results: list[Tensor] = []
    for part in _parts(model, x_BCYX, chunk):
        way_BCYX = x_BCYX[part] - start_BCYX[part]
        total_BCYX = torch.zeros_like(way_BCYX)
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            between_BCYX = start_BCYX[part] + (1 + node) / 2 * way_BCYX  # nodes are in [-1, 1]
            (gradient_BCYX,) = _gradients(model, between_BCYX, target.part(part), None, [])
            total_BCYX += weight / 2 * gradient_BCYX
        results.append(way_BCYX * total_BCYX)
    return torch.cat(results)


def patch_sums(values_BYX: Tensor, model: Model) -> Tensor:
    """Pixels summed over each patch, [B, rows, columns]."""
    image_size = values_BYX.shape[1], values_BYX.shape[2]
    (rows, cols), stride = model.spec.grid_for(image_size), model.spec.stride
    # A hybrid's last patches may reach over the edge of the image.
    padded_BYX = F.pad(values_BYX, (0, cols * stride - image_size[1], 0, rows * stride - image_size[0]))
    return padded_BYX.reshape(-1, rows, stride, cols, stride).sum(dim=(2, 4))


def blurred(x_BCYX: Tensor, stride: int) -> Tensor:
    """The images without anything of the size of a patch or two, by a Gaussian."""
    sigma = 2 * stride
    reach = 3 * sigma
    place = torch.arange(-reach, reach + 1, device=x_BCYX.device, dtype=x_BCYX.dtype)
    kernel = torch.exp(-(place**2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    flat = x_BCYX.flatten(0, 1)[:, None]
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), kernel[None, None, None, :])
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), kernel[None, None, :, None])
    return flat.reshape(x_BCYX.shape)


def _relevance(block: Block, y_BTD: Tensor, gradient_BTD: Tensor, grid: tuple[int, int]) -> Tensor:
    """One layer's matrix of gradient rollout, [B, T, T]; rows sum to 1."""
    tokens = range(y_BTD.shape[1])
    with torch.no_grad():
        weights_BHTT = block.attention_weights(y_BTD, grid, range(block.spec.heads), tokens)
        raised_BTT = (weights_BHTT * block.weight_gradients(y_BTD, gradient_BTD, grid)).relu().mean(dim=1)
        raised_BTT.diagonal(dim1=1, dim2=2).add_(1)
        return raised_BTT / raised_BTT.sum(dim=-1, keepdim=True)


def _gradients(
    model: Model, x_BCYX: Tensor, target: Target, tape: Tape | None, names: Sequence[str]
) -> tuple[Tensor, ...]:
    """Gradients of the scores by what the tape keeps under these names, or by the images without names."""
    # Parameters that want no gradient need no copy of what they were multiplied with.
    frozen = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    with torch.inference_mode(False), torch.enable_grad():
        x_BCYX = x_BCYX.detach().clone().requires_grad_()
        score_B = torch.func.functional_call(_Score(model, target), frozen, (x_BCYX, tape))
        return torch.autograd.grad(score_B.sum(), [x_BCYX] if tape is None else [tape[name] for name in names])


class _Score(nn.Module):
    """Images to scores, for `functional_call`, which takes modules."""

    def __init__(self, model: Model, target: Target) -> None:
        super().__init__()
        self.model, self.target = model, target

    def forward(self, x_BCYX: Tensor, tape: Tape | None) -> Tensor:
        return self.target.score(self.model, x_BCYX, tape)


def _parts(model: Model, x_BCYX: Tensor, chunk: int | None) -> Iterator[slice]:
    """The images a few at a time."""
    step = chunk or _gradients_at_once(model, x_BCYX)
    return (slice(start, start + step) for start in range(0, len(x_BCYX), step))


def _gradients_at_once(model: Model, x_BCYX: Tensor) -> int:
    if not isinstance(model, ViT):
        kept = activation_bytes(model.spec, half=False)
        return max(1, min(_IMAGES_AT_ONCE, _MOST_BYTES // (kept.kept + kept.working)))
    spec = model.spec
    rows, cols = spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    # Of each block: inputs of two norms, q, k, v, attention's output, and the MLP before and after its GELU.
    per_token = spec.num_blocks * (8 * spec.width + 2 * spec.mlp_dim)
    activations = (rows * cols + spec.num_prefix) * per_token
    return max(1, min(_MOST_ACTIVATIONS // activations, images_at_once(model, x_BCYX)))
