"""The client: sessions over remote blocks, and transformers' own models with their blocks replaced by them.

Owns what happens on the user's machine: embeddings, norm and head, sampling, the route in use. Keeps every
connection on one daemon thread per `SwarmConnection`; nothing here needs or disturbs an event loop of the caller.
"""
