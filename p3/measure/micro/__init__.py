"""The smaller benchmarks, one for each claim: `p3 bench pushpull`, `kernels`, `soak` and so on."""
