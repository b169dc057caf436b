"""A simulated fleet: what GPU nodes would report if a physical model of them ran, healthy or with a fault of a known cause.

Everything it makes carries `origin=simulated`; it opens no device and pretends to be no driver.
"""
