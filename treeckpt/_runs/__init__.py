"""A run: a directory of checkpoints, one for each saved step.

It imports `_api` and all below it, and `training` for registered models and optimizers. Start with `manager`; `catalog`
lists what a run directory holds, and `run` selects, pins and deletes.
"""
