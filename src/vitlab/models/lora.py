"""LoRA: fine-tuning through low-rank additions to frozen matrices (Hu et al. 2021), which can be merged away afterwards.

W x becomes W x + (alpha/rank)·B A x, with A [r, D] random and B [rows, r] zero, so that step 0 changes nothing. Our q, k and
v share one matrix of 3D rows; an adapter of q is an addition to the first D of them, and the other rows never see it. B A is
never formed while training. Letters: D inputs, R rows of the matrix, r rank.

    add_lora(model, LoraRule(), seed=0)
    train_only(model, "lora")
    ...
    lora_state(model), to be shared as it is (`weights/adapter.py`), or merge_lora(model), a model as any other
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.models.build import Model, allocate
from vitlab.models.vit import Block, ViT

LoraPart = Literal["q", "k", "v", "proj", "fc1", "fc2"]
_PLACES: dict[str, tuple[str, int, int]] = {  # the matrix in a block, which of its equal row blocks, of how many
    "q": ("attn.qkv", 0, 3),
    "k": ("attn.qkv", 1, 3),
    "v": ("attn.qkv", 2, 3),
    "proj": ("attn.proj", 0, 1),
    "fc1": ("mlp.fc1", 0, 1),
    "fc2": ("mlp.fc2", 0, 1),
}
_START = 11  # keeps the adapters' random numbers apart from other uses of the same seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule:
    """Which matrices get an adapter, and how large. q and v are the LoRA paper's choice; alpha = rank adds B A as it is."""

    rank: int = 8  # the LoRA paper finds ranks from 1 to 64 about equally good (its table 6)
    alpha: float = 8.0
    parts: tuple[LoraPart, ...] = ("q", "v")

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise UsageError(f"lora.rank and lora.alpha must be positive, not {self.rank} and {self.alpha}")
        if not self.parts or len(set(self.parts)) < len(self.parts) or not set(self.parts) <= set(_PLACES):
            raise UsageError(f"lora.parts must name some of {', '.join(_PLACES)}, each once, not {list(self.parts)}")


class LoraLinear(nn.Linear):
    """A dense layer with adapters on some of its rows. Its weight and bias keep their names, so they are stored as always."""

    def __init__(self, plain: nn.Linear, parts: Sequence[str], rule: LoraRule, draw: torch.Generator) -> None:
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.scale = rule.alpha / rule.rank
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        reach = 1 / math.sqrt(self.in_features)  # as the authors' code draws A: Kaiming-uniform with a = √5
        for part in parts:
            rows = self.out_features // _PLACES[part][2]
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
        start = _PLACES[part][1] * count
        return slice(start, start + count)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight with all additions made, [R, D]. Added in float64: one rounding instead of several."""
        weight_RD = self.weight.to(torch.float64, copy=True)
        for part, a_rD in self.lora_a.items():
            weight_RD[self.rows_of(part)] += self.scale * self.lora_b[part].double() @ a_rD.double()
        return weight_RD.to(self.weight.dtype)


def is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


def add_lora(model: nn.Module, rule: LoraRule, *, seed: int) -> None:
    """Puts adapters into every block of `model`, in place. Its answers and the names of its weights stay what they were."""
    if not isinstance(model, ViT):
        raise UsageError("LoRA goes into the blocks of a Vision Transformer; a ResNet has none")
    if any(map(is_adapter, model.state_dict())):
        raise UsageError("the model has adapters already", hint="Merge them first.")
    draw = generator(seed, _START)
    for block in model.blocks:
        assert isinstance(block, Block)
        for place in dict.fromkeys(_PLACES[part][0] for part in rule.parts):
            owner = block.get_submodule(place.partition(".")[0])
            name = place.partition(".")[2]
            plain = owner.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            parts = [part for part in rule.parts if _PLACES[part][0] == place]
            setattr(owner, name, LoraLinear(plain, parts, rule, draw))


def merge_lora(model: Model) -> Model:
    """A plain model with the adapters added into its matrices, and the keys of any other. `model` stays as it is."""
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
    """What `train_only(model, "lora")` trains: the adapters, and the head, without which they answer nothing."""
    return {name: value for name, value in model.state_dict().items() if is_kept(name)}


@torch.no_grad()
def load_lora_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts back what `lora_state` gave, into a model with the same adapters."""
    own = lora_state(model)
    odd = sorted(own.keys() ^ state.keys()) or sorted(n for n in own if own[n].shape != state[n].shape)
    if odd:
        raise UsageError(f"the adapter does not fit this model at '{odd[0]}'", hint="Rank and parts must be the same.")
    for name, value in state.items():
        own[name].copy_(value)
