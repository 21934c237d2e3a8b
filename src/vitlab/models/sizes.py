"""The published sizes, as tables to be checked by eye against their sources.

Owns numbers only. The families' grammars combine them with the patch size or the width that rides in the name.
"""

from typing import NamedTuple


class Size(NamedTuple):
    """One row of the paper's Table 1."""

    width: int
    depth: int
    mlp_dim: int
    heads: int


# B, L, H: paper Table 1. Ti, S: the authors' released configs. The rest: big_vision `models/vit.py`, `decode_variant`.
VIT_SIZES: dict[str, Size] = {
    "mu": Size(32, 1, 128, 2),
    "Ti": Size(192, 12, 768, 3),
    "S": Size(384, 12, 1536, 6),
    "M": Size(512, 12, 2048, 8),
    "B": Size(768, 12, 3072, 12),
    "L": Size(1024, 24, 4096, 16),
    "So400m": Size(1152, 27, 4304, 16),
    "H": Size(1280, 32, 5120, 16),
    "g": Size(1408, 40, 6144, 16),
    "G": Size(1664, 48, 8192, 16),
    "e": Size(1792, 56, 15360, 16),
}

# Units per stage. 26: the AugReg hybrids' configs; 50 to 152: He et al. 2016; 200: big_vision `models/bit.py`.
RESNET_STAGES: dict[int, tuple[int, int, int, int]] = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
