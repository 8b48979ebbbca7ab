"""Hosts on one machine, joined by links of a chosen rate."""
