"""The base of every model: a spec, a representation and a linear head."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vitlab.core.errors import UsageError, require_choice, with_article
from vitlab.models.results import AttentionLayer, AttentionMaps, Features, GridAttention, Queries, resolve_indices
from vitlab.models.spec import GridResize, ModelSpec, Pair, TokenKind
from vitlab.models.tape import Tape, keep


class Model(nn.Module):
    """Images [B, C, Y, X] -> logits [B, K], or the representation without a head."""

    spec: ModelSpec
    head: nn.Linear | None

    # Modules that forget what they computed until the backward pass, where activations are recomputed.
    recompute_units: ClassVar[tuple[type[nn.Module], ...]] = ()
    # Modules whose weights are gathered by themselves where they are sharded; those that hold large matrices travel in half
    # precision, which is what autocast would make of them anyway.
    sharding_units: ClassVar[tuple[type[nn.Module], ...]] = ()
    half_precision_units: ClassVar[tuple[type[nn.Module], ...]] = ()

    def forward(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        y_BD = self.represent(x_BCYX, tape)
        return y_BD if self.head is None else keep(tape, "logits", self.head(y_BD))

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head sees, [B, D]."""
        raise NotImplementedError

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:
        """Outputs of chosen blocks: class token, all positions, or their mean."""
        raise NotImplementedError

    def attention(
        self,
        x_BCYX: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: Queries = "all",
        chunk: int | None = None,
    ) -> AttentionMaps:
        """Attention weights, where `spec.has_attention_maps`."""
        raise self.no_attention()

    def attention_layers(
        self,
        x_BCYX: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: Queries = "all",
    ) -> Iterator[tuple[int, Tensor]]:
        """The same, one layer after the other."""
        raise self.no_attention()

    def attention_geometry(self, image_size: Pair) -> tuple[AttentionLayer, ...]:
        """The layers that attend, each with its own grid; as many as `spec.attention_shape` says."""
        return ()

    def attention_on_grids(
        self, x_BCYX: Tensor, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[GridAttention]:
        """Weights of every place, one layer after the other, each on its own grid: of whatever attends, not of ViTs alone.

        Layers count as in `attention_geometry`. In `eval()` mode: batch norm in training looks at the other images too.
        """
        raise self.no_attention()

    def no_attention(self) -> UsageError:
        """Why there are no maps from token to token."""
        if self.spec.attention_shape[0]:
            return UsageError(
                f"{with_article(type(self).__name__)} has no sequence of tokens: it attends between convolutions, on "
                "grids that shrink from stage to stage",
                hint="model.attention_on_grids(x) gives the weights of each of its layers.",
            )
        return UsageError(
            f"{with_article(type(self).__name__)} model has no attention to show", hint="Choose a ViT or a hybrid."
        )

    def first_filters(self) -> tuple[Tensor, str]:
        """The filters that see the pixels, as they are applied, [D, C, P, P], and which layer they are of."""
        raise NotImplementedError

    def resized_positions(self, grid: Pair, how: GridResize | None) -> dict[str, Tensor]:
        """Position tables on another grid, by parameter name; by the spec's rule."""
        return {}

    def zero_init(self) -> None:
        """Start the head at zero (paper section 3.2)."""
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)


class StageModel(Model):
    """A model of stages with a feature map each, which halve it: BiT, EfficientNet, AxialResNet."""

    @property
    def stage_maps(self) -> tuple[str, ...]:
        """The feature map that each stage gives, by its name on the tape; the last is what is pooled."""
        raise NotImplementedError

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:
        """Stage outputs as vectors, per position or averaged; the last is what comes before pooling."""
        tokens = tokens or "mean"
        require_choice("tokens", tokens, ("cls", "patches", "mean"))
        if tokens == "cls":
            what = f"{with_article(type(self).__name__)} has no class token"
            raise UsageError(what, hint="Use tokens='mean' or 'patches'.")
        names = {i: self.stage_maps[i] for i in resolve_indices(layers, self.spec.num_blocks, "stage")}
        tape = Tape(*names.values())
        self(x_BCYX, tape)
        maps = {i: tape[name] for i, name in names.items()}
        grids = {i: (map_BCYX.shape[2], map_BCYX.shape[3]) for i, map_BCYX in maps.items()}
        vectors_BNC = {i: map_BCYX.flatten(2).mT for i, map_BCYX in maps.items()}
        layers_out = {i: v.mean(dim=1) if tokens == "mean" else v for i, v in vectors_BNC.items()}
        return Features(layers=layers_out, tokens=tokens, grids=grids)
