"""The files of a checkpoint as data: shard headers, the index, timings and the records of saves in progress.

It imports `core.planning`, `core.tree`, `core.sharding` and `errors`. Start with `records` and `index`.

.. include:: FORMAT.md
"""
