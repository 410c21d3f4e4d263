"""The name of the logger of saves and loads: the names of `torch.distributed.checkpoint.logging_handlers`."""

from torch.distributed.checkpoint.logging_handlers import DCP_LOGGER_NAME as DCP_LOGGER_NAME
