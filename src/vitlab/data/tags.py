"""What a random number is for. Each use of a seed in this room has a number of its own, so that no two draw alike."""

CROP, MIRROR, JITTER, RANDAUGMENT, ERASE, MIX, AFFINE, SHIFT = range(
    16, 24
)  # below 16: the order of examples, the noise of training
