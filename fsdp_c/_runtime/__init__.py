"""Sharding, states, parameter groups and collectives: the code under ``fully_shard``."""
