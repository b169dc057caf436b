"""A double of NVML: a C library of our own, loaded by the real pynvml, driven through shared memory."""
