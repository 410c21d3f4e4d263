"""The state of an object that stands inside the state of another object.

An object whose `state_dict()` returns further objects (a scheduler that keeps another in an attribute) is saved with
their states in their places. The class tells such a state from a dict, so that a restore finds the object of each. In a
structure it is a mapping class, see `_core.tree.mappings`.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from .dict_attributes import METADATA
from .value_codec import type_name


class ObjectState(dict[Any, Any]):
    """A state dict, with the class of the object that it is of: `state.of == "package.module:Class"`."""

    of: str
    versions: dict[Any, Any]
    """Those of a module's submodules; empty for all other objects."""

    @classmethod
    def from_object(cls, owner: object, state: Mapping[Any, Any]) -> ObjectState:
        """Returns the state of an object as one inside another state."""
        found = cls(state)
        found.of, found.versions = type_name(type(owner)), dict(getattr(state, METADATA, {}))
        return found

    def with_items(self, items: Mapping[Any, Any]) -> ObjectState:
        """Returns a state of the same object with other items."""
        found = type(self)(items)
        vars(found).update(vars(self))
        return found

    def as_state_dict(self) -> dict[Any, Any]:
        """Returns the state as `load_state_dict` of its object takes it."""
        if not self.versions:
            return dict(self)
        found = collections.OrderedDict(self)
        setattr(found, METADATA, collections.OrderedDict(self.versions))
        return found
