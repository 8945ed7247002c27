"""What: the patches, as data.

``model`` has the types, ``toml`` reads the files of ``patches/``, ``gate`` tells whether a version
of torch is affected.  Imports ``_rewriting`` for the kinds of edit, and the modules of the package
that stand alone.
"""
