"""The `shoal` command. Owns what a person types and reads; says what is wrong and what to do in one line.

Promises that `--help` loads neither torch nor a service. Holds no rule of the swarm: it asks and shows.
"""
