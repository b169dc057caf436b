"""Redfish: reads a BMC over HTTPS, by the schemas of DMTF's DSP8010 in both their generations, and by what vendors make of them."""
