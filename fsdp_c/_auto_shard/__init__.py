"""Parts of ``fsdp_c/auto_shard.py``."""
