"""The logger to which saves and loads write their events: the names of `torch.distributed.checkpoint.logger`."""

from torch.distributed.checkpoint.logger import _dcp_logger as _dcp_logger
