"""Faults on purpose, and what a job makes of them: `p3 chaos`, described in docs/reliability.md."""
