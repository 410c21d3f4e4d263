"""Operations on trees of arrays, distributed or not: state dict utilities for any tree.

    whole = tc.trees.gather(state)                    # every rank has the full arrays
    whole = tc.trees.gather(state, ranks=[0])         # rank 0 has them, the others their specs
    state = tc.trees.distribute(whole, like, src=0)   # and back, cut as `like` is
    host = tc.trees.offload(state, pin=True)
    names = tc.trees.flatten_names(state)             # {"model.layers.0.weight": ...}

Only `copy_into` changes its arguments, and no function returns their memory unless its docstring says so. For all of
them:

- An object with `state_dict` and `load_state_dict` is replaced by its state, as for `save`.
- Containers come back as new ones of the same kind, Python values, BytesIO too, as equal ones. A value of an unknown
  kind is refused (TreeError), because it cannot be copied reliably; `type_check=False` takes it by `copy.deepcopy`, or
  sends its pickle.
- 0-dim and empty arrays are arrays like others. A non-contiguous array comes back dense, in C order; a conjugate or
  negative view as the values that it shows. Complex numbers and every other dense dtype are kept bit for bit.
- A Parameter stays one, with `requires_grad`; a Buffer too; a DTensor, ShardedTensor or `Sharded` stays what it is in
  its layout, where the function does not change just that. Sparse and nested tensors are taken apart and made again.
  Quantised tensors, other subclasses and DTensors of partial sums are refused (TreeError, LayoutError), all by name;
  but `gather` reduces partial sums, and `offload` copies them as they are, and any subclass.
- Leaves that are one object, or show exactly the same memory, stay one object and share memory again. `offload` keeps
  all views that overlap, with their strides, and containers that stand at several places.
- Arrays on the meta device have no data to copy: see each function.

The same options mean the same: `ranks` are those that receive arrays, `src` is the rank that has the tree, `pin` and
`share` are kinds of host memory. `gather`, `broadcast` and `distribute(src=...)` use collectives of the process group,
so call them on all of its ranks; ranks are counted within the group. If one rank fails before data is sent, all raise.
"""

from __future__ import annotations

from .._core.public_names import publish
from ._collectives import broadcast, distribute, gather
from ._compare import Sameness, same_structure
from ._moving import copy_into
from ._names import flatten_names, unflatten_names
from ._offloading import empty_like, offload

__all__ = [
    "Sameness",
    "broadcast",
    "copy_into",
    "distribute",
    "empty_like",
    "flatten_names",
    "gather",
    "offload",
    "same_structure",
    "unflatten_names",
]
publish(__name__, __all__, globals())
