"""`p3 trace`: what a run has recorded, in words, and held against changes. See docs/trace.md."""
