"""A libamd_smi.so of our own, driven through shared memory, for the real amdsmi package in a real reader process."""
