"""Parts of ``fsdp_c/checkpoint.py``."""
