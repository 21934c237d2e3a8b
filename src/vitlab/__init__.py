"""vitlab: the Vision Transformer paper as software.

    import vitlab
    model = vitlab.create_model("ViT-B/16", num_classes=10)
    clf = vitlab.load("runs/demo/transfer")

The public names, and nothing else. Each is imported when first used, so that `import vitlab` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.core.errors import VitlabError as VitlabError
    from vitlab.data.sources.named import list_data as list_data
    from vitlab.data.sources.opening import open_data as open_data
    from vitlab.engines.classifier import load as load
    from vitlab.engines.classifier import save as save
    from vitlab.engines.conversion import convert as convert
    from vitlab.engines.model_facts import model_info as model_info
    from vitlab.models.build import create_model as create_model
    from vitlab.models.names import list_models as list_models
    from vitlab.models.tape import Tape as Tape
    from vitlab.pipelines.digits_demo import demo as demo
    from vitlab.pipelines.noisy_student_run import noisy_student as noisy_student
    from vitlab.runs.checkup import doctor as doctor
    from vitlab.runs.data_tools import check_data as check_data
    from vitlab.runs.data_tools import shard_data as shard_data
    from vitlab.runs.data_tools import split_data as split_data
    from vitlab.runs.evaluation.comparison import compare as compare
    from vitlab.runs.evaluation.embedding import embed as embed
    from vitlab.runs.evaluation.evaluation_run import evaluate as evaluate
    from vitlab.runs.evaluation.prediction import predict as predict
    from vitlab.runs.inspection_run import inspect as inspect
    from vitlab.runs.training.planning import plan as plan
    from vitlab.runs.training.training_run import train as train
    from vitlab.serving.serve_run import serve as serve
    from vitlab.studies.listing import list_studies as list_studies
    from vitlab.studies.listing import show_study as show_study
    from vitlab.studies.reporting import report_study as report_study
    from vitlab.studies.study_run import run_study as run_study
    from vitlab.training.recipe import list_recipes as list_recipes
    from vitlab.training.recipe_book import show_recipe as show_recipe
    from vitlab.weights.catalogue import list_pretrained as list_pretrained

_HOMES = {
    "Tape": "vitlab.models.tape",
    "VitlabError": "vitlab.core.errors",
    "check_data": "vitlab.runs.data_tools",
    "compare": "vitlab.runs.evaluation.comparison",
    "convert": "vitlab.engines.conversion",
    "create_model": "vitlab.models.build",
    "demo": "vitlab.pipelines.digits_demo",
    "doctor": "vitlab.runs.checkup",
    "embed": "vitlab.runs.evaluation.embedding",
    "evaluate": "vitlab.runs.evaluation.evaluation_run",
    "inspect": "vitlab.runs.inspection_run",
    "list_data": "vitlab.data.sources.named",
    "list_models": "vitlab.models.names",
    "list_pretrained": "vitlab.weights.catalogue",
    "list_recipes": "vitlab.training.recipe",
    "list_studies": "vitlab.studies.listing",
    "load": "vitlab.engines.classifier",
    "model_info": "vitlab.engines.model_facts",
    "noisy_student": "vitlab.pipelines.noisy_student_run",
    "open_data": "vitlab.data.sources.opening",
    "plan": "vitlab.runs.training.planning",
    "predict": "vitlab.runs.evaluation.prediction",
    "report_study": "vitlab.studies.reporting",
    "run_study": "vitlab.studies.study_run",
    "save": "vitlab.engines.classifier",
    "serve": "vitlab.serving.serve_run",
    "show_recipe": "vitlab.training.recipe_book",
    "show_study": "vitlab.studies.listing",
    "shard_data": "vitlab.runs.data_tools",
    "split_data": "vitlab.runs.data_tools",
    "train": "vitlab.runs.training.training_run",
}

__all__ = [
    "Tape",
    "VitlabError",
    "check_data",
    "compare",
    "convert",
    "create_model",
    "demo",
    "doctor",
    "embed",
    "evaluate",
    "inspect",
    "list_data",
    "list_models",
    "list_pretrained",
    "list_recipes",
    "list_studies",
    "load",
    "model_info",
    "noisy_student",
    "open_data",
    "plan",
    "predict",
    "report_study",
    "run_study",
    "save",
    "serve",
    "shard_data",
    "show_recipe",
    "show_study",
    "split_data",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("vitlab")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlab' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
