"""The interface of torch.distributed.checkpoint (DCP) on treeckpt: `import treeckpt.dcp as dcp` is the whole change.

`save`, `load` and `async_save` take DCP's arguments and use treeckpt's planner, staging and format; start in `save` and
`load`. `Writer` and `Reader` are DCP's storage interfaces on treeckpt's format, for programs that take a storage, and
`install` puts them in the place of DCP's own. All other names are those of torch.distributed.checkpoint.

It may import everything below `_runs`, and is the one package on top that imports torch at once.

.. include:: DIFFERENCES.md
"""

from typing import Any

from .._arrays.registry import needs_torch
from .._core.public_names import publish

with needs_torch(__name__):
    import torch.distributed.checkpoint as _torch_dcp

    from ._calls import async_save, load, save
    from ._install import install, uninstall
    from ._storage import DcpReader as Reader
    from ._storage import DcpWriter as Writer

__all__ = ["Reader", "Writer", "async_save", "install", "load", "save", "uninstall"]
publish(__name__, __all__, globals())

FileSystemWriter, FileSystemReader = Writer, Reader


def __getattr__(name: str) -> Any:
    """The names of torch.distributed.checkpoint."""
    return getattr(_torch_dcp, name)
