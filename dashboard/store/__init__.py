"""Runs and checkpoints by id, their indexes in SQLite tables, the dashboard's cache directory, and its jobs.

It may import the package `treeckpt`, but no other room of the dashboard. Start at `library.Library`.
"""
