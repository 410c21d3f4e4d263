"""A storage for quantized safetensors: the names of `torch.distributed.checkpoint.quantized_hf_storage`."""

from torch.distributed.checkpoint.quantized_hf_storage import *  # pyright: ignore[reportWildcardImportFromLibrary]
