"""When and where: puts rewritten code into the running torch, and takes it out again.

``activation`` has modules of torch patched as they are imported, ``patcher`` applies the patches of
a catalogue, ``replacement`` exchanges the code of a live function, ``functions`` finds it,
``wrapper`` is the way for a torch without its source, ``cache`` keeps what was derived, ``session``
is what the package offers, ``state`` and ``status`` tell of it.  Imports ``_catalogue`` and
``_rewriting``; commands, audit and scenarios may import it.
"""
