"""Storages for directories of safetensors: the names of `torch.distributed.checkpoint.hf_storage`."""

from torch.distributed.checkpoint.hf_storage import *  # pyright: ignore[reportWildcardImportFromLibrary]
