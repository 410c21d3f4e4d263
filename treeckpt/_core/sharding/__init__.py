"""Regions of arrays, layouts (which rank holds which regions), which rank writes each element; element types.

It imports `errors` alone. Start with `region` and `placements`.
"""
