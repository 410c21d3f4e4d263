"""Regions of arrays, the layouts that give them to ranks, and which rank writes each element; element types.

It imports `errors` alone. Start with `region` and `placements`.
"""
