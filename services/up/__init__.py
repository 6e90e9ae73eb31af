"""`shoal up`: a whole swarm on one machine, in one process group.

Owns the embedded PostgreSQL and Valkey, the order in which services start, and their end. Promises that
nothing it started outlives it, not even after `kill -9`. Does not restart what dies: it says what
died and stops.
"""
