"""The Vision Transformer, Eq. 1-8 of the paper, from a frozen `ViTSpec`.

Owns the modules that hold parameters, the order in which they act and how they start; formulas are in `ops.py`.
Letters: B batch, C channels, Y X pixel rows and columns, N patches, T tokens, D width, H heads, Dh head width, Q queries,
L position tables, K classes.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.core.errors import UsageError, require_choice
from vitlab.models import init, ops
from vitlab.models.model import Model
from vitlab.models.resnet import UNITS, Trunk
from vitlab.models.results import (
    AttentionLayer,
    AttentionMaps,
    Features,
    GridAttention,
    Queries,
    require_images,
    resolve_indices,
    token_names,
)
from vitlab.models.spec import GridResize, Pair, TokenKind, ViTSpec
from vitlab.models.tape import Tape, keep

_QUERY_ROWS = 512  # rows of the weight matrix computed at a time in `Attention.weights`; bounds its scratch memory

_POSITION_STD = 0.02
_MLP_BIAS_STD = 1e-6
_REGISTER_STD = 1e-6  # DINOv2


class Attention(nn.Module):
    """Multi-head self-attention (Eq. 5-8), with q, k and v in one matrix."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)
        self.relative = None
        if spec.pos == "relative":
            self.relative = nn.Parameter(torch.empty(2 * spec.num_tokens - 1, spec.width // spec.heads))

    def init_weights(self, generator: Generator | None) -> None:
        init.dense(self.qkv, generator, parts=3)
        init.dense(self.proj, generator)
        if self.relative is not None:
            nn.init.normal_(self.relative, std=_POSITION_STD, generator=generator)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self._split(x_BTD)
        dropout = self.spec.attention_dropout if self.training else 0.0
        y_BHTDh = ops.attend(q, k, v, self._bias(q), dropout)
        return self.proj(y_BHTDh.transpose(1, 2).flatten(2))

    def weights(self, x_BTD: Tensor, heads: Sequence[int], queries: Sequence[int]) -> Tensor:
        """The softmax matrix for chosen heads and queries, [B, H, Q, T], in slabs."""
        q, k, _ = self._split(x_BTD)
        bias = self._bias(q)
        head_index = torch.tensor(heads, device=x_BTD.device)
        weights_BHQT = q.new_empty(len(q), len(heads), len(queries), q.shape[2], dtype=torch.float32)
        for start in range(0, len(queries), _QUERY_ROWS):
            row_index = torch.tensor(queries[start : start + _QUERY_ROWS], device=x_BTD.device)
            slab_bias = None if bias is None else bias[:, head_index][:, :, row_index]
            slab = ops.attention_weights(q[:, head_index][:, :, row_index], k[:, head_index], slab_bias)
            weights_BHQT[:, :, start : start + len(row_index)] = slab
        return weights_BHQT

    def weight_gradients(self, x_BTD: Tensor, dy_BTD: Tensor) -> Tensor:
        """Gradients of a score by the softmax weights, [B, H, T, T], from those by the output `dy_BTD`.

        The output is proj(weights @ v), so dS/dweights[i, j] = dS/d(weights @ v)[i] . v[j], and the fused kernel stays on.
        """
        _, _, v_BHTDh = self._split(x_BTD)
        dtype = torch.promote_types(v_BHTDh.dtype, torch.float32)  # half types lose what is summed here
        do_BTD = dy_BTD.to(dtype) @ self.proj.weight.to(dtype)
        do_BHTDh = do_BTD.unflatten(2, (self.spec.heads, -1)).transpose(1, 2)
        return do_BHTDh @ v_BHTDh.to(dtype).mT

    def _split(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(x_BTD).reshape(batch, tokens, 3, self.spec.heads, width // self.spec.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _bias(self, q_BHTDh: Tensor) -> Tensor | None:
        return None if self.relative is None else ops.relative_logits(q_BHTDh, self.relative)


class Mlp(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, spec: ViTSpec, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.approximate = {"tanh": "tanh", "exact": "none"}[spec.gelu]
        self.fc1 = nn.Linear(spec.width, spec.mlp_dim)
        self.fc2 = nn.Linear(spec.mlp_dim, spec.width)

    def init_weights(self, generator: Generator | None) -> None:
        init.dense(self.fc1, generator, bias_std=_MLP_BIAS_STD)
        init.dense(self.fc2, generator, bias_std=_MLP_BIAS_STD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x_BTD), approximate=self.approximate)
        return self.fc2(F.dropout(hidden, self.dropout, self.training))


class Block(nn.Module):
    """Pre-norm residual block, Eq. 2-3; `index` sets stochastic depth and axis."""

    def __init__(self, spec: ViTSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        # Rises linearly to the full rate at the last block (AugReg).
        self.drop_rate = spec.stochastic_depth * index / max(1, spec.num_blocks - 1)
        self.axis = {"full": None, "axial": index % 2}[spec.attention]
        self.norm1 = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.attn = Attention(spec)
        self.norm2 = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp = Mlp(spec, dropout=spec.dropout)
        scaled = spec.layer_scale is not None
        self.scale1 = nn.Parameter(torch.empty(spec.width)) if scaled else None
        self.scale2 = nn.Parameter(torch.empty(spec.width)) if scaled else None

    def init_weights(self, _: Generator | None) -> None:
        for scale in (self.scale1, self.scale2):
            if scale is not None and self.spec.layer_scale is not None:
                nn.init.constant_(scale, self.spec.layer_scale)

    def forward(self, x_BTD: Tensor, grid: Pair, tape: Tape | None = None) -> Tensor:
        name = f"block{self.index:02d}/"
        y = keep(tape, name + "norm1", self.norm1(x_BTD))
        y = keep(tape, name + "attn", self._attend(y, grid))
        x_BTD = keep(tape, name + "+attn", x_BTD + self._branch(y, self.scale1))
        y = keep(tape, name + "mlp", self.mlp(self.norm2(x_BTD)))
        return keep(tape, name + "+mlp", x_BTD + self._branch(y, self.scale2))

    def _attend(self, x_BTD: Tensor, grid: Pair) -> Tensor:
        if self.axis is None:
            return self.attn(x_BTD)
        return ops.unfold_axis(self.attn(ops.fold_axis(x_BTD, grid, self.axis)), grid, self.axis)

    def attention_weights(self, x_BTD: Tensor, grid: Pair, heads: Sequence[int], queries: Sequence[int]) -> Tensor:
        """Softmax weights [B, H, Q, T] of the normalised input; zero where an axial block cannot look."""
        if self.axis is None:
            return self.attn.weights(x_BTD, heads, queries)
        lines_SLD = ops.fold_axis(x_BTD, grid, self.axis)
        weights_SHLL = self.attn.weights(lines_SLD, heads, range(lines_SLD.shape[1]))
        return ops.unfold_weights(weights_SHLL, grid, self.axis, queries)

    def weight_gradients(self, x_BTD: Tensor, dy_BTD: Tensor, grid: Pair) -> Tensor:
        """Gradients by all softmax weights, [B, H, T, T], from those by the output of attention."""
        if self.axis is None:
            return self.attn.weight_gradients(x_BTD, dy_BTD)
        lines_SLD, dy_SLD = (ops.fold_axis(each, grid, self.axis) for each in (x_BTD, dy_BTD))
        gradients_SHLL = self.attn.weight_gradients(lines_SLD, dy_SLD)
        return ops.unfold_weights(gradients_SHLL, grid, self.axis, range(grid[0] * grid[1]))

    def _branch(self, y_BTD: Tensor, scale: Tensor | None) -> Tensor:
        """Dropout, layer scale and stochastic depth of a residual branch."""
        y_BTD = F.dropout(y_BTD, self.spec.dropout, self.training)
        if scale is not None:
            y_BTD = y_BTD * scale
        return ops.drop_path(y_BTD, self.drop_rate) if self.training else y_BTD


class Positions(nn.Module):
    """The learned position tables, on any grid.

    Without `cls_in_pos` (big_vision) the class token has no slot, and zeros are added to it.
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        assert spec.pos_resize in ops.GRID_RESIZES, spec.pos_resize  # looked up at the first image of another size
        tables = {"stem": 1, "every": spec.num_blocks, "shared": 1}[spec.pos_at]
        rows, cols = spec.grid
        slots = int(spec.uses_cls and spec.cls_in_pos)
        self.table = self.rows = self.cols = self.cls = None
        match spec.pos:
            case "learned":
                self.table = nn.Parameter(torch.empty(tables, slots + rows * cols, spec.width))
            case "learned2d":
                self.rows = nn.Parameter(torch.empty(tables, rows, spec.width // 2))
                self.cols = nn.Parameter(torch.empty(tables, cols, spec.width // 2))
                self.cls = nn.Parameter(torch.empty(tables, 1, spec.width)) if slots else None
            case "none" | "relative" | "sincos2d":
                pass  # no table: relative ones are in each `Attention`, and sincos2d is a formula
            case _:
                assert_never(spec.pos)

    def init_weights(self, generator: Generator | None) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=_POSITION_STD, generator=generator)

    def forward(self, grid: Pair, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Class slot [L, 1, D] and patch positions [L, N, D], each None where absent.

        Of `like` only device and dtype count, for positions that are no parameters.
        """
        if self.spec.pos == "sincos2d":
            return None, ops.sincos2d(grid, self.spec.width, like.device).to(like.dtype)
        tables = self.resized(grid, self.spec.pos_resize)
        if "table" in tables:
            slots = tables["table"].shape[1] - grid[0] * grid[1]
            return (tables["table"][:, :1] if slots else None), tables["table"][:, slots:]
        if "rows" in tables:
            x_LND = tables["cols"].repeat(1, grid[0], 1)
            y_LND = tables["rows"].repeat_interleave(grid[1], dim=1)
            return self.cls, torch.cat([x_LND, y_LND], dim=2)
        return None, None

    def resized(self, grid: Pair, how: GridResize) -> dict[str, Tensor]:
        """The tables on another grid, by name, in forward and when weights move."""
        tables: dict[str, Tensor] = {}
        if self.table is not None:
            slots = self.table.shape[1] - self.spec.grid[0] * self.spec.grid[1]
            patches_LND = ops.resize_grid(self.table[:, slots:], self.spec.grid, grid, how)
            unchanged = grid == self.spec.grid
            tables["table"] = self.table if unchanged else torch.cat([self.table[:, :slots], patches_LND], dim=1)
        if self.rows is not None and self.cols is not None:
            tables["rows"] = ops.resize_line(self.rows, grid[0], how)
            tables["cols"] = ops.resize_line(self.cols, grid[1], how)
        if self.cls is not None:
            tables["cls"] = self.cls
        return tables


class MapHead(nn.Module):
    """big_vision's attention pooling: one learned query, then a residual MLP."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.probe = nn.Parameter(torch.empty(1, 1, spec.width))
        self.q = nn.Linear(spec.width, spec.width)
        self.kv = nn.Linear(spec.width, 2 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp = Mlp(spec, dropout=0.0)  # big_vision's head has none

    def init_weights(self, generator: Generator | None) -> None:
        init.xavier(self.probe, 1, self.probe.shape[-1], generator)
        init.dense(self.q, generator)
        init.dense(self.kv, generator, parts=2)
        init.dense(self.proj, generator)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self._split(x_BTD)
        y_B1D = self.proj(ops.attend(q, k, v).transpose(1, 2).flatten(2))
        return (y_B1D + self.mlp(self.norm(y_B1D)))[:, 0]

    def weights(self, x_BTD: Tensor) -> Tensor:
        """The softmax weights of the learned query, [B, H, T]."""
        q, k, _ = self._split(x_BTD)
        return ops.attention_weights(q, k)[:, :, 0]

    def _split(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, _, width = x_BTD.shape
        heads = self.spec.heads
        q_BH1Dh = self.q(self.probe.expand(batch, -1, -1)).reshape(batch, 1, heads, -1).transpose(1, 2)
        k, v = self.kv(x_BTD).reshape(batch, -1, 2, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q_BH1Dh, k, v


class ViT(Model):
    """The Vision Transformer, plain, hybrid or axial.

    Images of another size than the spec's are welcome as long as the patch divides them: the position grid is resized.
    """

    recompute_units = (Block, *UNITS)
    sharding_units = (Attention, Mlp, *UNITS)
    half_precision_units = (Attention, Mlp)

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec: ViTSpec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        self.stem = Trunk(spec.stem, spec.in_channels) if spec.stem else None
        self.embed = nn.Conv2d(spec.embed_channels, spec.width, spec.patch, spec.patch)
        self.cls = nn.Parameter(torch.empty(1, 1, spec.width)) if spec.uses_cls else None
        self.registers = nn.Parameter(torch.empty(1, spec.registers, spec.width)) if spec.registers else None
        self.pos = Positions(spec)
        self.blocks = nn.ModuleList(Block(spec, i) for i in range(spec.num_blocks))
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        match spec.pool:
            case "cls" | "gap":
                self.map = None
            case "map":
                self.map = MapHead(spec)
            case _:
                assert_never(spec.pool)
        match spec.head:
            case "linear":
                self.pre_logits = None
            case "mlp-tanh":
                self.pre_logits = nn.Linear(spec.width, spec.width)
            case _:
                assert_never(spec.head)
        self.head = nn.Linear(spec.width, spec.num_classes) if spec.num_classes else None

    def init_weights(self, generator: Generator | None) -> None:
        """Start patches, tokens and `pre_logits`; the other parts start themselves."""
        init.lecun(self.embed, generator)
        if self.cls is not None:
            nn.init.zeros_(self.cls)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=_REGISTER_STD, generator=generator)
        if self.pre_logits is not None:
            init.lecun(self.pre_logits, generator)

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head sees, [B, D]: pooled, and through `pre_logits` where there is one."""
        patches_BND, grid = self.embed_patches(x_BCYX, tape)
        z_BTD = self.encode_patches(patches_BND, grid, kept_index_BN=self._kept_patches(patches_BND), tape=tape)
        return self.represent_tokens(z_BTD, tape)

    def _kept_patches(self, patches_BND: Tensor) -> Tensor | None:
        """Patch dropout: the numbers of the patches that each image keeps in training; None for all."""
        if not self.training or not self.spec.patch_dropout:
            return None
        return ops.random_order(patches_BND)[:, : self.spec.num_kept(patches_BND.shape[1])]

    def encode_patches(
        self, patches_BND: Tensor, grid: Pair, *, kept_index_BN: Tensor | None = None, tape: Tape | None = None
    ) -> Tensor:
        """All tokens after the last block, before the final norm, of what `embed_patches` gave.

        `kept_index_BN` has the numbers of the patches that are seen at all, as for masked autoencoders and patch dropout; each
        keeps its own position. Positions of later blocks, axial attention and relative positions need the whole grid, and
        refuse it.
        """
        z_BTD, pos_LTD = self._join(patches_BND, grid, kept_index_BN, tape)
        for i, block in enumerate(self.blocks):
            z_BTD = block(_at_block(z_BTD, pos_LTD, i), grid, tape)
        return z_BTD

    def represent_tokens(self, z_BTD: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head would see if the blocks ended with these tokens: final norm, pooling, `pre_logits`."""
        z_BTD = keep(tape, "encoded", self.norm(z_BTD))
        y_BD = keep(tape, "pooled", self._pool(z_BTD))
        if self.pre_logits is not None:
            y_BD = keep(tape, "pre_logits", torch.tanh(self.pre_logits(y_BD)))
        return y_BD

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:
        """Block outputs after the final norm: class token, patches, or their mean.

        `tokens` defaults to `cls` where there is one, else `mean`. What the head sees is `represent`.
        """
        kind: TokenKind = tokens or ("cls" if self.spec.uses_cls else "mean")
        require_choice("tokens", kind, ("cls", "patches", "mean"))
        if kind == "cls" and not self.spec.uses_cls:
            raise UsageError(
                f"a model with pool={self.spec.pool} has no class token", hint="Use tokens='mean' or 'patches'."
            )
        wanted = resolve_indices(layers, self.spec.num_blocks, "layer")
        z_BTD, grid, pos_LTD = self._tokens(x_BCYX)
        outputs: dict[int, Tensor] = {}
        for i in range(max(wanted) + 1):
            z_BTD = self.blocks[i](_at_block(z_BTD, pos_LTD, i), grid)
            if i in wanted:
                outputs[i] = self._select(self.norm(z_BTD), kind)
        return Features(layers=outputs, tokens=kind, grids=dict.fromkeys(outputs, grid))

    def attention_layers(
        self,
        x_BCYX: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: Queries = "all",
    ) -> Iterator[tuple[int, Tensor]]:
        """Number and softmax weights [B, H, Q, T] of one layer after the other; none is kept.

        Recomputed from each block's q and k beside the fused kernel; the forward pass itself runs as always. A block of an
        axial model looks along a row or a column, and has zeros elsewhere.
        """
        wanted, heads, rows = self._wanted_attention(x_BCYX, layers, heads, queries)
        return self._attention_layers(x_BCYX, wanted, heads, rows)

    @torch.no_grad()
    def _attention_layers(
        self, x_BCYX: Tensor, layers: Sequence[int], heads: Sequence[int], rows: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        z_BTD, grid, pos_LTD = self._tokens(x_BCYX)
        for i in range(max(layers) + 1):
            z_BTD, block = _at_block(z_BTD, pos_LTD, i), self.blocks[i]
            assert isinstance(block, Block)
            if i in layers:
                yield i, block.attention_weights(block.norm1(z_BTD), grid, heads, rows)
            if i < max(layers):
                z_BTD = block(z_BTD, grid)

    def attention(
        self,
        x_BCYX: Tensor,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: Queries = "all",
        chunk: int | None = None,
    ) -> AttentionMaps:
        """Softmax weights of chosen layers, heads and queries, by `chunk` images."""
        wanted, heads, rows = self._wanted_attention(x_BCYX, layers, heads, queries)
        if chunk is not None and chunk < 1:
            raise UsageError(f"chunk must be at least 1 image, not {chunk}")
        parts: dict[int, list[Tensor]] = {i: [] for i in wanted}
        for x_chunk in x_BCYX.split(chunk or max(1, len(x_BCYX))):
            for i, weights_BHQT in self._attention_layers(x_chunk, wanted, heads, rows):
                parts[i].append(weights_BHQT)
        grid = self.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
        maps = {i: torch.cat(part) for i, part in parts.items()}
        names = token_names(self.spec.uses_cls, self.spec.registers, grid)
        return AttentionMaps(layers=maps, heads=heads, queries=rows, tokens=names, grid=grid)

    def attention_geometry(self, image_size: Pair) -> tuple[AttentionLayer, ...]:
        """Every block, all on the grid of patches; one of an axial model has zeros where it cannot look."""
        grid, stride, prefix = self.spec.grid_for(image_size), self.spec.stride, self.spec.num_prefix
        names = (f"block{i:02d}" for i in range(self.spec.num_blocks))
        return tuple(AttentionLayer(name, grid, stride, num_prefix=prefix) for name in names)

    def attention_on_grids(
        self, x_BCYX: Tensor, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[GridAttention]:
        """The weights of the patches, as `attention_layers` gives them."""
        geometry = self.attention_geometry((x_BCYX.shape[2], x_BCYX.shape[3]))
        chosen = resolve_indices(heads, self.spec.heads, "head")
        found = self.attention_layers(x_BCYX, layers=layers, heads=chosen, queries="patches")
        return (GridAttention(i, geometry[i], chosen, weights_BHNT) for i, weights_BHNT in found)

    def first_filters(self) -> tuple[Tensor, str]:
        """The kernels of the patch embedding; of a hybrid, whose patches are cut out of features, its stem's first ones."""
        if self.stem is not None:
            return self.stem.root.float_kernel(), "stem's first convolution"
        return self.embed.weight, "patch embedding"

    @torch.no_grad()
    def pooling_weights(self, x_BCYX: Tensor) -> Tensor:
        """Softmax weights of attention pooling over the last layer's tokens, [B, H, T]."""
        if self.map is None:
            raise UsageError(f"a model with pool={self.spec.pool} has no attention pooling")
        tape = Tape("encoded")
        self.represent(x_BCYX, tape)
        return self.map.weights(tape["encoded"])

    def _wanted_attention(
        self, x_BCYX: Tensor, layers: Sequence[int] | None, heads: Sequence[int] | None, queries: Queries
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Numbers of layers, heads and query tokens."""
        spec = self.spec
        require_images(x_BCYX, spec.in_channels)
        rows, cols = spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
        wanted = resolve_indices(layers, spec.num_blocks, "layer"), resolve_indices(heads, spec.heads, "head")
        return *wanted, _query_rows(queries, spec, rows * cols + spec.num_prefix)

    def _tokens(self, x_BCYX: Tensor) -> tuple[Tensor, Pair, Tensor | None]:
        """Eq. 1: the tokens, their grid, and positions that blocks have yet to add."""
        patches_BND, grid = self.embed_patches(x_BCYX)
        z_BTD, pos_LTD = self._join(patches_BND, grid)
        return z_BTD, grid, pos_LTD

    def embed_patches(self, x_BCYX: Tensor, tape: Tape | None = None) -> tuple[Tensor, Pair]:
        """x_p E of Eq. 1, [B, N, D], before tokens and positions, and the grid of the patches."""
        spec = self.spec
        require_images(x_BCYX, spec.in_channels)
        grid = spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
        if spec.pos == "relative" and grid != spec.grid:
            raise UsageError(
                f"relative positions are learned for a {spec.grid[0]}x{spec.grid[1]} grid and mean nothing on "
                f"{grid[0]}x{grid[1]}"
            )
        if self.stem is not None:
            x_BCYX = keep(tape, "stem", self.stem(x_BCYX, tape, "stem/"))
        return keep(tape, "patches", self.embed(x_BCYX).flatten(2).mT), grid

    def _join(
        self, patches_BND: Tensor, grid: Pair, kept_index_BN: Tensor | None = None, tape: Tape | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The rest of Eq. 1: class token, registers and positions, and the positions that blocks have yet to add."""
        spec = self.spec
        cls_pos_L1D, patch_pos_LND = self.pos(grid, self.embed.weight)
        pos_LTD = self._align(cls_pos_L1D, patch_pos_LND)
        parts = [
            token.expand(patches_BND.shape[0], -1, -1) for token in (self.cls, self.registers) if token is not None
        ]
        z_BTD = torch.cat([*parts, patches_BND], dim=1)
        if spec.pos_at == "stem":
            z_BTD = z_BTD if pos_LTD is None else z_BTD + pos_LTD
            pos_LTD = None
        if kept_index_BN is not None:
            spec.require_subsets()
            kept_BND = ops.KeptTokens.apply(z_BTD[:, spec.num_prefix :], kept_index_BN)
            z_BTD = torch.cat([z_BTD[:, : spec.num_prefix], kept_BND], dim=1)
        z_BTD = keep(tape, "tokens", F.dropout(z_BTD, spec.dropout, self.training))
        return z_BTD, pos_LTD

    def _align(self, cls_L1D: Tensor | None, patches_LND: Tensor | None) -> Tensor | None:
        """One position per token: zeros for registers and a class token without slot."""
        if patches_LND is None:
            return None
        blank = self.spec.num_prefix - (cls_L1D is not None)
        zeros = patches_LND.new_zeros(patches_LND.shape[0], blank, patches_LND.shape[2])
        return torch.cat([part for part in (cls_L1D, zeros, patches_LND) if part is not None], dim=1)

    def resized_positions(self, grid: Pair, how: GridResize | None) -> dict[str, Tensor]:
        """Position tables on another grid, by parameter name."""
        tables = self.pos.resized(grid, how or self.spec.pos_resize)
        return {f"pos.{name}": table for name, table in tables.items()}

    def _pool(self, z_BTD: Tensor) -> Tensor:
        match self.spec.pool:
            case "cls":
                return self._select(z_BTD, "cls")
            case "gap":
                return self._select(z_BTD, "mean")
            case "map":
                assert self.map is not None
                return self.map(z_BTD)
            case _:
                assert_never(self.spec.pool)

    def _select(self, z_BTD: Tensor, kind: TokenKind) -> Tensor:
        if kind == "cls":
            return z_BTD[:, 0]
        patches_BND = z_BTD[:, self.spec.num_prefix :]
        return patches_BND.mean(dim=1) if kind == "mean" else patches_BND


def _at_block(z_BTD: Tensor, pos_LTD: Tensor | None, index: int) -> Tensor:
    """Table 8's other injections: add positions at the input of every block."""
    if pos_LTD is None:
        return z_BTD
    return z_BTD + pos_LTD[index % len(pos_LTD)]  # pos_at=every: a table for each block; shared: one for all


def _query_rows(queries: Queries, spec: ViTSpec, num_tokens: int) -> tuple[int, ...]:
    if not isinstance(queries, str):
        return resolve_indices(queries, num_tokens, "query token")
    require_choice("queries", queries, ("all", "cls", "patches"))
    if queries == "cls" and not spec.uses_cls:
        raise UsageError(f"a model with pool={spec.pool} has no class token", hint="Use queries='patches' or 'all'.")
    return {"all": tuple(range(num_tokens)), "cls": (0,), "patches": tuple(range(spec.num_prefix, num_tokens))}[queries]
