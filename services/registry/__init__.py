"""Who is alive: leases of block servers, the models of the swarm, and who may join.

Owns the leases (Redis), the pinned weights of each model, the history of servers and the API keys (PostgreSQL).
Promises that a lease ends by the store's own clock, that watchers see every change in order, and that losing either
store costs no running server its lease for longer than the store is away. Plans no routes and moves no servers.
"""
