"""What an audit finds in memory: the graph of references, and the words for it.

``graph`` is pure, on indices; ``words`` names frames, cells, attributes and owners; ``tensors``
counts bytes.  Imports nothing of the package; ``dynamo_cyclefix.audit`` imports it.
"""
