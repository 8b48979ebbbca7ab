"""The paper's experiments: jobs of P3 and of MXNet's own stores in turns, what they took, tables and figures of it."""
