"""What works with dist_sync, with MXNet's own P3 and with p3_sync, found by running the same code with each.

`make compatibility` runs every cell and writes docs/compatibility.json and docs/compatibility.md.
"""
