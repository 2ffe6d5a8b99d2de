"""What runs under ``fully_shard``: sharding, states, parameter groups, collectives."""
