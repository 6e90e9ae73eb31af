"""What every service process needs and none should write twice.

Owns: settings from flags and environment, the TLS gRPC server with health and reflection, who may call
what, errors on the wire, logs, starting and stopping, connections to PostgreSQL and Redis. Promises that a
method nobody wrote a policy for is refused, and that no unexpected error's text leaves the process. Knows
no service.
"""
