"""Messages between the ranks of a job, without collectives of the user's process groups.

It imports `_core`, `reports` and `_io.os_errors`; never `_io.storage`. Start with `comm`, the interface. `rounds` keeps
the messages of one save apart from those of others; `collective` raises an error of one rank on all ranks.
"""
