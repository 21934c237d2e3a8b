"""Colours for numbers: maps along which equal steps look equally large, also in grey and to the colour-blind.

The lightness of a sequential map rises all the way; that of the diverging one rises to its middle, which is zero, and falls.
"""

import functools
from typing import Any

import numpy as np

from vitlab.core.errors import UsageError

Array = np.ndarray[Any, Any]

# At evenly spaced places, interpolated between them. The first three are matplotlib's (CC0), at most 7 of 255 levels away.
_ANCHORS = {
    "viridis": "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e"
    " 1f988b 22a884 35b779 54c568 7ad151 a5db36 d2e21b fde725",
    "magma": "000004 0b0924 20114b 3b0f70 57157e 721f81 8c2981 a8327d"
    " c43c75 de4968 f1605d fa7f5e fe9f6d febf84 fddea0 fcfdbf",
    "inferno": "000004 0c0826 240c4f 420a68 5d126e 781c6d 932667 ae305c"
    " c73e4c dd513a ed6925 f8850f fca50a fac62d f2e661 fcffa4",
    # For photos: without inferno's dark half, which would darken what it is drawn over.
    "ember": "5b1d99 7a1c9e 981d97 b42586 cc3471 df495a ee6142 f67d27 f99b0e f8b91c f4d744 f7f08a",
    "blue-red": "123a7c 2860a8 4e87c4 84aed8 bcd3e8 f3f3f3 ecc8b6 dc9a7d c56a4c a33c28 741a17",
}
COLOURMAPS = tuple(_ANCHORS)
_LEVELS = 256


@functools.cache
def table(name: str) -> Array:
    """The map as uint8 [256, 3], from the least value to the greatest; not for writing."""
    if name not in _ANCHORS:
        raise UsageError(f"there is no colour map '{name}'", hint=f"There are {', '.join(COLOURMAPS)}.")
    anchors_N3 = np.array([list(bytes.fromhex(colour)) for colour in _ANCHORS[name].split()], float)
    at, places = np.linspace(0, 1, _LEVELS), np.linspace(0, 1, len(anchors_N3))
    made = np.stack([np.interp(at, places, channel) for channel in anchors_N3.T], axis=1).round().astype(np.uint8)
    made.setflags(write=False)
    return made


def coloured(values: Array, name: str) -> Array:
    """The colours of values from 0 to 1, uint8 [..., 3]; what lies outside has the colour of the nearer end."""
    return table(name)[(np.clip(values, 0, 1) * (_LEVELS - 1)).round().astype(np.uint8)]
