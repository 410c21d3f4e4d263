"""Runs and checkpoints by id, their indexes in SQLite tables, and the dashboard's cache directory.

It may import the package `treeckpt`, but no other room of the dashboard. Start at `library.Library`.
"""
