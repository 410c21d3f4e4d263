"""State dicts of models and optimizers by name: the names of `torch.distributed.checkpoint.state_dict`."""

from torch.distributed.checkpoint.state_dict import *  # pyright: ignore[reportWildcardImportFromLibrary]
