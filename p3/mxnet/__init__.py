"""MXNet's front end: everything of P3 that knows MXNet."""
