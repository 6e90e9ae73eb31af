"""Discovery without the control plane: signed server records in a hivemind DHT.

Owns the keys under which records lie, the rules by which a record found there is believed, and this process's node
of the DHT. Promises that whatever others store, a reader gets only what servers of the swarm signed themselves, and
that nothing here forks. hivemind, which loads torch, is imported when a node is opened and not before.
"""
