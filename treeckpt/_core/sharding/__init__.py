"""Regions of arrays, layouts (which rank holds which regions), runs of integers, and element types.

It imports `errors` alone. Start with `region` and `placements`.
"""
