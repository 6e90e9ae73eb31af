"""A node of the DHT that is always there: others join by it, and it tells the registry what it reads.

Owns the node's identity, so that its address stays the same over restarts. Promises that it answers whether or not
the control plane does. Decides nothing about records: the registry checks each one again.
"""
