"""Files of checkpoints: on local disks, in memory and in object stores.

It imports `core`, `reports` and `io.os_errors`; never `io.comm`. Start with `store` for one checkpoint's directory and
`run_store` for a directory of checkpoints; `shard_reader` reads verified ranges of a shard.
"""
