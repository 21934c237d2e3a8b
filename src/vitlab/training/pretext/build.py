"""From a recipe and its encoder to the module of its pretext task."""

import torch

from vitlab.core.errors import UsageError
from vitlab.engines.classifier import load
from vitlab.models.model import Model
from vitlab.models.spec import ViTSpec
from vitlab.models.vit import ViT
from vitlab.training.pretext.features import FeatureDistillation, Teacher, teacher_for
from vitlab.training.pretext.mae import MaskedAutoencoder
from vitlab.training.pretext.masked import MaskedPatches
from vitlab.training.pretext.task import Pretext
from vitlab.training.recipe import Recipe
from vitlab.training.rules import FeaturesRule, MaeRule, MaskedRule


def make_pretext(recipe: Recipe, encoder: Model, device: torch.device) -> Pretext:
    """The task around an encoder; its own parameters start by the recipe's seed. A teacher goes to `device` at once."""
    assert isinstance(encoder, ViT), "refused with the recipe"
    rule, preprocess = recipe.objective, recipe.data.preprocess()
    match (rule.masked, rule.mae, rule.features):
        case (MaskedRule() as masked, _, _):
            task: Pretext = MaskedPatches(encoder, masked, preprocess)
        case (_, MaeRule() as mae, _):
            task = MaskedAutoencoder(encoder, mae)
        case (_, _, FeaturesRule() as features):
            task = FeatureDistillation(encoder, features, load_features_teacher(recipe, device), preprocess)
        case _:
            raise UsageError(f"objective.kind={rule.kind} is not a task without labels")
    task.start(recipe.seed)
    return task


def load_features_teacher(recipe: Recipe, device: torch.device) -> Teacher:
    """The recipe's teacher; an error where it cannot teach this student."""
    assert isinstance(recipe.model, ViTSpec), "refused with the recipe"
    loaded = load(recipe.teacher, device=str(device), quiet=True)
    return teacher_for(loaded.model, loaded.preprocess, recipe.model, recipe.teacher)
