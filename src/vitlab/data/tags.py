"""Purposes of random numbers: each use of a seed in this room has its own key."""

# Below 16: data/batches.py and training/loop.py.
CROP, MIRROR, JITTER, RANDAUGMENT, ERASE, MIX, AFFINE, SHIFT = range(16, 24)
