"""Routes for sessions, planned on the newest picture of the swarm.

Owns one immutable snapshot, fed by the registry's watch stream. Promises to answer from the last one while the
registry is away, and to keep nothing that cannot be rebuilt. Decides nothing that `shoal.swarm.routing` does not.
"""
