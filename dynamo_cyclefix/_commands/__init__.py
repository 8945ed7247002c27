"""The command line: one file a command, which ``main`` imports only when it is asked for.

Each has ``add_arguments`` and ``run``, which returns the exit code.  May import everything else of
the package, and nothing imports it but the entry point.
"""
