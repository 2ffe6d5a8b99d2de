"""Finds torch and the CUDA compiler for setup.py, and runs CMake. It is not installed."""
