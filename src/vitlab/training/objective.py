"""Losses, one number per image, so that whoever calls can leave padding out and divide by the images of all processes.

Owns the formulas and what a recipe says about them. Everything is computed and returned in float32 whatever precision the
model ran in, or in float64 where the logits are. Targets are class numbers [B], or shares of the classes [B, K], as MixUp makes
them. Letters: B batch, K classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UnknownName, UsageError
from vitlab.data.dataset import Dataset
from vitlab.training.rules import Objective


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of each image, with the class weights, priors and teacher that the objective asks for."""

    objective: Objective
    class_weights_K: Tensor | None = None
    log_prior_K: Tensor | None = None
    teacher: nn.Module | None = None

    def __call__(self, x_BCYX: Tensor, logits_BK: Tensor, targets: Tensor) -> Tensor:
        teacher_BK = None if self.teacher is None else self.teacher(x_BCYX)
        return losses(
            self.objective,
            logits_BK,
            targets,
            class_weights_K=self.class_weights_K,
            log_prior_K=self.log_prior_K,
            teacher_BK=teacher_BK,
        )


def loss_for(objective: Objective, dataset: Dataset, device: torch.device, teacher: nn.Module | None = None) -> Loss:
    """The loss on images of `dataset`, whose classes and counts decide weights and priors."""
    if objective.is_pretext:
        return Loss(objective)
    counts_K = dataset.labels.counts(len(dataset.classes))
    weights_K, prior_K = weights_of(objective, dataset.classes, counts_K), log_prior_of(objective, counts_K)
    on_device = (None if value_K is None else value_K.to(device) for value_K in (weights_K, prior_K))
    return Loss(objective, *on_device, teacher=teacher)


def losses(
    rule: Objective,
    logits_BK: Tensor,
    targets: Tensor,
    *,
    class_weights_K: Tensor | None = None,
    log_prior_K: Tensor | None = None,
    teacher_BK: Tensor | None = None,
) -> Tensor:
    """The loss of each image, [B]. Class weights, priors and a teacher's logits are given exactly when the rule asks for them.

    With logit adjustment the labels are compared with logits + tau·log prior (Menon et al. 2021, eq. 10), and the teacher with
    the logits themselves, which are what is used after training.
    """
    match rule.kind:
        case "softmax":
            adjusted_BK = logits_BK if log_prior_K is None else _wide(logits_BK) + rule.logit_adjustment * log_prior_K
            losses_B = softmax_losses(adjusted_BK, targets, rule.label_smoothing, class_weights_K)
        case "sigmoid":
            losses_B = sigmoid_losses(logits_BK, targets, rule.label_smoothing, class_weights_K)
        case "masked-patches" | "mae" | "feature-distillation":
            return logits_BK  # the module of the task gives losses, and there are no labels to compare with
    if rule.distillation is None or teacher_BK is None:
        return losses_B
    share = rule.distillation.weight
    return (1 - share) * losses_B + share * distillation_losses(logits_BK, teacher_BK, rule.distillation.temperature)


def softmax_losses(
    logits_BK: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights_K: Tensor | None = None
) -> Tensor:
    """-Σ y·log softmax(logits), with y smoothed to (1-ε)·y + ε/K. A head of zeros gives exactly ln K.

    With class weights, an image counts as much as its classes do, Σ y·w over the targets before smoothing. torch's own
    `weight=` differs with smoothing on, where it also weighs the share that every class gets, and divides by Σ w.
    """
    logits_BK = _wide(logits_BK)
    wide = None if targets.ndim == 1 else targets.to(logits_BK.dtype)
    losses_B = F.cross_entropy(
        logits_BK, targets if wide is None else wide, label_smoothing=label_smoothing, reduction="none"
    )
    if class_weights_K is None:
        return losses_B
    # Not a matrix product: autocast would round it to half precision.
    return losses_B * (class_weights_K[targets] if wide is None else (wide * class_weights_K).sum(dim=1))


def sigmoid_losses(
    logits_BK: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights_K: Tensor | None = None
) -> Tensor:
    """-Σ y·log σ(logits) + (1-y)·log(1-σ(logits)): a yes or no for each class, summed over them as big_vision does.

    Smoothing is the softmax loss's, (1-ε)·y + ε/K. A class weight multiplies the yes of its class only (torch's
    `pos_weight`): a class without images keeps learning to say no.
    """
    logits_BK, num_classes = _wide(logits_BK), logits_BK.shape[1]
    y_BK = (F.one_hot(targets, num_classes) if targets.ndim == 1 else targets).to(logits_BK.dtype)
    y_BK = (1 - label_smoothing) * y_BK + label_smoothing / num_classes
    terms_BK = F.binary_cross_entropy_with_logits(logits_BK, y_BK, pos_weight=class_weights_K, reduction="none")
    return terms_BK.sum(dim=1)


def _wide(logits_BK: Tensor) -> Tensor:
    return logits_BK if logits_BK.dtype == torch.float64 else logits_BK.float()


def distillation_losses(logits_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(teacher ‖ student) of both softmax distributions at temperature T.

    The factor keeps the gradient's size: softening by T makes it smaller by T² (Hinton et al. 2015, section 2).
    """
    student_BK = F.log_softmax(logits_BK.float() / temperature, dim=1)
    wanted_BK = F.log_softmax(teacher_BK.detach().float() / temperature, dim=1)
    return temperature**2 * F.kl_div(student_BK, wanted_BK, log_target=True, reduction="none").sum(dim=1)


def class_weights(counts_K: Tensor) -> Tensor:
    """Inverse frequency, N / (classes present · count), so that every class has the same say.

    The mean over the images of the training set is 1: the loss keeps its scale and the learning rate its meaning. A class
    without images has no frequency to invert, and gets 1.
    """
    counts_K = counts_K.double()
    present_K = counts_K > 0
    if not present_K.any():
        raise UsageError("class weights need at least one image")
    weights_K = counts_K.sum() / (present_K.sum() * counts_K)
    return torch.where(present_K, weights_K, 1).float()


def weights_of(rule: Objective, classes: Sequence[str], counts_K: Tensor) -> Tensor | None:
    """The class weights that a rule asks for, for these classes and their counts; numbers by hand are used as they are."""
    given = rule.class_weights
    if isinstance(given, str):
        return class_weights(counts_K) if given == "auto" else None
    if isinstance(given, Mapping):
        for name in given:
            if name not in classes:
                raise UnknownName("class in objective.class_weights:", name, classes)
        given = tuple(given.get(name, 1.0) for name in classes)
    if len(given) != len(classes):
        raise UsageError(
            f"objective.class_weights has {len(given):,} numbers, and the data has {len(classes):,} classes",
            hint="Give one for each class, in the order of their names, or a table of class names.",
        )
    return torch.tensor(given)


def log_prior_of(rule: Objective, counts_K: Tensor) -> Tensor | None:
    """log(count / N) of each class where the rule adjusts logits. A class without images counts as if it had one."""
    if not rule.logit_adjustment:
        return None
    counts_K = counts_K.double().clamp_min(1)
    return (counts_K / counts_K.sum()).log().float()
