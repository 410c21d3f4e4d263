"""Adapters of array libraries: each describes the library's arrays, reads and writes their bytes, and creates new ones.

It imports `_core`; torch only in the modules of its own arrays. Start with `base`, the interfaces, and `registry`,
which finds the adapter of a leaf.
"""
