"""Saving: from a tree on each rank to one committed checkpoint.

It imports `_arrays`, `_io`, `reports` and `_core`; never `_loading`. Start with `save`, which runs the four steps of
the protocol: agree, write, report, commit. `background` runs the same steps behind the training.
"""
