"""What a checkpoint holds, as DCP describes it: the names of `torch.distributed.checkpoint.metadata`."""

from torch.distributed.checkpoint.metadata import *  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from torch.distributed.checkpoint.metadata import STORAGE_TYPES as STORAGE_TYPES
