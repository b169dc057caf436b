"""Power and cooling of a host as its BMC and its PDUs tell it: supplies, headroom, redundancy, inlet, fans, circuits."""
