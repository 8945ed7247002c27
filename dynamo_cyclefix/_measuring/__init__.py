"""Measures what the patches buy: a service loop in processes of its own, with and without them.

``experiment`` plans and runs, ``supervisor`` and ``worker`` are the two sides of a process,
``workloads`` what it serves, ``analysis``, ``report`` and ``plot`` what is made of the records.
Imports nothing of the package but the activation; the command ``measure`` imports it.
"""
