"""Input and output: `comm/` exchanges messages between ranks, `storage/` reads and writes files and object stores.

It imports `_core` and `reports`. Start with `storage.store` and `comm.comm`, the interfaces.
"""
