"""The record in which a family of models registers.

A family is its spec, this record of plain functions and data, and the module that the record imports on demand: names and cost
are known without torch. Whoever adds one writes these and a line in `families.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from vitlab.models.spec import ModelSpec

S = TypeVar("S", bound=ModelSpec)


class LoraTarget(NamedTuple):
    """Rows of a block's matrix that one adapter adds to: slice `part` of `parts`."""

    matrix: str  # name in the block, as `attn.qkv`
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """What autograd keeps of one image until the backward pass, in bytes.

    With `recompute`, a block keeps its input alone, and the rest of one block at a time comes back in the backward pass.
    """

    kept: int
    block: int  # the most that one block or unit alone keeps
    working: int  # the largest pair of gradients that the backward pass holds at once, besides
    weight_copies: int = 0  # made anew in every forward pass, however many images there are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(Generic[S]):
    """One kind of model. Parameter names in here are ours, as in `state_dict`."""

    spec: type[S]
    module: str  # `package.file:class`, imported when a model is built: it loads torch

    # Names
    listed: tuple[str, ...]  # by `vitlab models list`; the grammar may take more
    parse: Callable[[str], S | None]  # a name or its alias; None where it belongs to another family
    spell: Callable[[S], str]
    architecture: Callable[[S], str]  # all that a name must show; specs alike in this have the same name
    # Where lower case loses a letter.
    alias_words: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    # Cost in closed form
    count_params: Callable[[S], int]
    count_macs: Callable[[S, bool], int]  # the flag: with convolution taps that fall on padding
    activation_bytes: Callable[[S, bool, bool], ActivationBytes]  # flags: half precision, recompute
    count_buffers: Callable[[S], int] = lambda _: 0  # stored beside the parameters, as running statistics are

    # Parameters by name
    block: str  # pattern that matches the start of a block's parameters; its group is the block's number
    after_blocks: tuple[str, ...]  # starts of names behind the last block
    input_kernel: Callable[[S], str]  # the weight that sees the channels of the image
    never_decayed: str = r"(?!)"  # pattern of parameters of two and more axes that are not matrices
    lora_targets: Mapping[str, LoraTarget] = dataclasses.field(default_factory=dict[str, LoraTarget])

    # Fields of the spec
    dropout_fields: tuple[str, ...] = ()  # rates that act in training alone
    free_fields: tuple[str, ...] = ()  # besides these, image size and classes, in which start weights may differ
    # The first spec with the parts that the second has besides and that start as the identity, so that weights of the first
    # can start a model of the second.
    grown: Callable[[S, S], S] = lambda old, _: old

    formats: tuple[str, ...] = ()  # modules in `weights/formats` that read and write other people's files of it
