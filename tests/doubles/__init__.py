"""Doubles of hardware and vendors that a test machine does not have. They behave badly on purpose."""
