"""Purposes of random numbers: each use of a seed in this room has its own key."""

CROP, MIRROR, JITTER, RANDAUGMENT, ERASE, MIX, AFFINE, SHIFT = range(
    16, 24
)  # below 16: data/batches.py and training/loop.py
