"""Runs and checkpoints by id, their indexes in files of columns, the dashboard's cache directory, and its jobs.

It may import the package `treeckpt`, but no other room of the dashboard. Start at `library.Library`.
"""
