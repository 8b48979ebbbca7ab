"""The laboratory: several hosts on one machine, joined by links of a chosen rate, to measure stores on."""
