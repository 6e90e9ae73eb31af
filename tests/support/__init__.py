"""What tests share: real stores, a whole swarm, and the check that a test leaves nothing behind."""
