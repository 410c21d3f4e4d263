"""Array libraries: those whose arrays are saved and loaded as such, beside torch and numpy.

    tc.arrays.register("mine", mine.Array, to_numpy=mine.view, from_numpy=mine.wrap)

Its arrays are saved, come back as its arrays, and are filled in place, cast, cut and resharded as those of numpy are.
"""

from __future__ import annotations

from ._arrays.registry import register
from ._core.public_names import publish

__all__ = ["register"]

publish(__name__, __all__, globals())
