"""The command line, `treeckpt COMMAND`.

It imports everything else in the package. Start with `main`, which parses the arguments; a module for each group of
commands, and `_report.terminal` prints their tables.
"""
