"""LoRA: fine-tuning by low-rank additions to frozen matrices (Hu et al. 2021).

W x becomes W x + (alpha/rank)·B A x, with A [r, D] random and B [rows, r] zero, so that step 0 changes nothing. Our q, k and
v share one matrix of 3D rows; an adapter of q is an addition to the first D of them, and the other rows never see it. B A is
never formed while training. Letters: D inputs, R rows of the matrix, r rank.

    add_lora(model, LoraRule(), seed=0)
    train_only(model, "lora")
    ...
    lora_state(model), to be shared as it is (`weights/adapter.py`), or merge_lora(model), a model as any other
"""

import math
import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.models.build import allocate
from vitlab.models.families import family_of
from vitlab.models.family import LoraTarget
from vitlab.models.lora_rule import LoraRule
from vitlab.models.model import Model
from vitlab.models.names import format_name

_START = 11  # keeps the adapters' random numbers apart from other uses of the same seed


class LoraLinear(nn.Linear):
    """A linear layer with adapters on some rows; weight and bias keep their names."""

    def __init__(
        self, plain: nn.Linear, targets: Mapping[str, LoraTarget], rule: LoraRule, draw: torch.Generator
    ) -> None:
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.scale = rule.alpha / rule.rank
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        reach = 1 / math.sqrt(self.in_features)  # as the authors' code draws A: Kaiming-uniform with a = √5
        self.targets = targets
        for part, target in targets.items():
            rows = self.out_features // target.parts
            a_rD = torch.empty(rule.rank, self.in_features).uniform_(-reach, reach, generator=draw)
            self.lora_a[part] = nn.Parameter(a_rD.to(plain.weight))
            self.lora_b[part] = nn.Parameter(plain.weight.new_zeros(rows, rule.rank))

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's own argument name
        y = F.linear(input, self.weight, self.bias)
        for part, a_rD in self.lora_a.items():
            rows = self.rows_of(part)
            y[..., rows] += self.scale * F.linear(F.linear(input, a_rD), self.lora_b[part])
        return y

    def rows_of(self, part: str) -> slice:
        """The rows of the matrix to which this adapter adds."""
        count = len(self.lora_b[part])
        start = self.targets[part].part * count
        return slice(start, start + count)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight with all additions, [R, D], in float64 so as to round once."""
        weight_RD = self.weight.to(torch.float64, copy=True)
        for part, a_rD in self.lora_a.items():
            weight_RD[self.rows_of(part)] += self.scale * self.lora_b[part].double() @ a_rD.double()
        return weight_RD.to(self.weight.dtype)


def is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


def add_lora(model: Model, rule: LoraRule, *, seed: int) -> None:
    """Put adapters into every block, in place; outputs and names do not change."""
    family = family_of(model.spec)
    if missing := [part for part in rule.parts if part not in family.lora_targets]:
        raise UsageError(
            f"LoRA needs matrices called {', '.join(missing)} in every block; {format_name(model.spec)} has none"
        )
    if any(map(is_adapter, model.state_dict())):
        raise UsageError("the model has adapters already", hint="Merge them first.")
    draw = generator(seed, _START)
    targets = {part: family.lora_targets[part] for part in rule.parts}
    for block in [module for name, module in model.named_modules() if re.fullmatch(family.block, f"{name}.")]:
        for matrix in dict.fromkeys(target.matrix for target in targets.values()):
            plain = block.get_submodule(matrix)
            assert isinstance(plain, nn.Linear)
            here = {part: target for part, target in targets.items() if target.matrix == matrix}
            block.set_submodule(matrix, LoraLinear(plain, here, rule, draw))


def merge_lora(model: Model) -> Model:
    """A new plain model with the adapters merged into its matrices."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items() if not is_adapter(name)}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            state[f"{name}.weight"] = module.merged()
    plain = allocate(model.spec)
    plain.load_state_dict(state, assign=True)
    return plain.train(model.training)


def is_kept(name: str) -> bool:
    """Whether this weight belongs to an adapter as it is shared: the head does, too."""
    return is_adapter(name) or name.startswith("head.")


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """What `train_only(model, "lora")` trains: the adapters and the head."""
    return {name: value for name, value in model.state_dict().items() if is_kept(name)}


@torch.no_grad()
def load_lora_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts back what `lora_state` gave, into a model with the same adapters."""
    current = lora_state(model)
    odd = sorted(current.keys() ^ state.keys()) or sorted(n for n in current if current[n].shape != state[n].shape)
    if odd:
        raise UsageError(f"the adapter does not fit this model at '{odd[0]}'", hint="Rank and parts must be the same.")
    for name, value in state.items():
        current[name].copy_(value)
