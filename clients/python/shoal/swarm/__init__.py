"""The rules of the swarm as pure functions over frozen values: spans, snapshots, coverage, routing, flow, placement.

Client, block server and control plane import the same functions, so each can decide alone when the others are
gone. Nothing here reads a clock, draws random numbers but from a given seed, or talks to anything.
"""
