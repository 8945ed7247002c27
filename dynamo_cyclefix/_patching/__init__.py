"""When and where: puts rewritten code into the running torch, and takes it out again.

``finder`` has the modules of torch patched as they are imported, ``patcher`` applies the patches of
a catalogue, ``replacement`` exchanges the code of a live function, ``wrapper`` is the way for a
torch without its source, ``cache`` keeps what was derived, ``session`` is what the package offers,
and ``status`` tells of it.  Imports ``_catalogue`` and ``_rewriting``; commands, audit and
scenarios may import it.
"""
