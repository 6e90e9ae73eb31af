"""Which parts of a transformers model are blocks and which are ends, how they are stored, and their identity.

Client and block server share this package; neither reads a tensor that is not its own through it.
"""
