"""The base of every model: a spec, a representation and a linear head."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vitlab.core.errors import UsageError, with_article
from vitlab.models.results import AttentionMaps, Features, Queries
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
        x_BCYX: Tensor,  # noqa: ARG002
        *,
        layers: Sequence[int] | None = None,  # noqa: ARG002
        heads: Sequence[int] | None = None,  # noqa: ARG002
        queries: Queries = "all",  # noqa: ARG002
        chunk: int | None = None,  # noqa: ARG002
    ) -> AttentionMaps:
        """Attention weights, where `spec.has_attention_maps`."""
        raise self.no_attention()

    def attention_layers(
        self,
        x_BCYX: Tensor,  # noqa: ARG002
        *,
        layers: Sequence[int] | None = None,  # noqa: ARG002
        heads: Sequence[int] | None = None,  # noqa: ARG002
        queries: Queries = "all",  # noqa: ARG002
    ) -> Iterator[tuple[int, Tensor]]:
        """The same, one layer after the other."""
        raise self.no_attention()

    def no_attention(self) -> UsageError:
        """Why there are no maps to show."""
        return UsageError(
            f"{with_article(type(self).__name__)} model has no attention to show", hint="Choose a ViT or a hybrid."
        )

    def resized_positions(self, grid: Pair, how: GridResize | None) -> dict[str, Tensor]:  # noqa: ARG002
        """Position tables on another grid, by parameter name; by the spec's rule."""
        return {}

    def zero_init(self) -> None:
        """Start the head at zero (paper section 3.2)."""
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
