"""Storages for paths and URLs, on the format of treeckpt: the names of `torch.distributed.checkpoint.filesystem`."""

from torch.distributed.checkpoint.filesystem import *  # pyright: ignore[reportWildcardImportFromLibrary]

from ._storage import DcpReader as FileSystemReader
from ._storage import DcpWriter as FileSystemWriter
