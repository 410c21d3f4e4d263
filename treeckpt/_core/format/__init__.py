"""The files of a checkpoint as data: shard headers, the index, timings and the records of saves in progress.

It imports `_core.planning`, `_core.tree`, `_core.sharding` and `errors`. Start with `records` and `index`.

.. include:: FORMAT.md
"""
