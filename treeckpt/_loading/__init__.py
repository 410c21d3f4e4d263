"""From the bytes of a checkpoint to a tree, in any layout; and its verification, repair and salvage.

It imports `_arrays`, `_io`, `reports` and `_core`; never `_saving`. Start with `load`: `match` finds the saved leaf of
each wanted one, `read_batch` collects the reads, `plan` joins and cuts them, and `execute_local`, `execute_remote` or
`execute_shared` carries them out. The load rules stand in `rules`, which it imports too.
"""
