"""What the smaller benchmarks start: nodes, workers, servers, and jobs of these."""
