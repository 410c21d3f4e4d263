"""Files of checkpoints: on local disks, in memory and in object stores.

It imports `_core`, `reports` and `_io.os_errors`; never `_io.comm`. Start with `store` for the directory of one
checkpoint or of several; `shard_reader` reads verified ranges of a shard.
"""
