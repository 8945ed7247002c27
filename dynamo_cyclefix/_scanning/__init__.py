"""Looks through torch's source for places that can still hold an exception.

``rules`` has what is looked for, ``flow`` follows a function's statements, ``package`` reads the
files of a torch.  Imports ``_catalogue``; the command ``scan`` imports it.
"""
