"""Files of checkpoints: on local disks, in memory and in object stores.

It imports `_core`, `reports` and `_io.os_errors`; never `_io.comm`. Start with `store` for one checkpoint's directory
and `run_store` for a directory of checkpoints; `shard_reader` reads verified ranges of a shard.
"""
