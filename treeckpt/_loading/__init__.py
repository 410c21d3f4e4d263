"""From the bytes of a checkpoint to a tree, in any layout; and its verification, repair and salvage.

It imports `rules`, `_foreign`, `_arrays`, `_io`, `reports`, `_inspect` and `_core`; never `_saving`. Start with
`run_load`, which opens one version of each checkpoint. `load` builds the tree: `match` finds the saved leaf of each
wanted one, `read_batch` collects the reads, `plan` joins and cuts them, and `execute_local`, `execute_remote` or
`execute_shared` carries them out.
"""
