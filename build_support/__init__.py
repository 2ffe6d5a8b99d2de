"""Finds torch and the CUDA compiler for setup.py, runs CMake, and compares releases of torch.

The package is not installed.
"""
