"""The lives of slices: recorded by every process of a job (P3_TRACE), put together by `p3 trace`. See docs/trace.md."""
