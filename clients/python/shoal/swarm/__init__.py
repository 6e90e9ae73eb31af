"""The rules of the swarm as pure functions over frozen values: spans, snapshots, coverage, routing.

Client, block server and control plane import the same functions, so each can decide alone when the others are
gone. Nothing here reads a clock, draws random numbers, or talks to anything.
"""
