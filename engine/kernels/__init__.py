"""Kernels in C++ for what torch has no fast operator for, and how they are compiled at first use."""
