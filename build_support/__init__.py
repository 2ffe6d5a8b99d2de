"""Finds torch and the CUDA compiler for setup.py. It is not installed."""
