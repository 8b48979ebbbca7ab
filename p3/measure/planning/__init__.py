"""`p3 plan`: a strategy (p3/plan/strategy.py) for a model on hosts and links, found in the simulator."""

BUDGET_S = 10.0  # for a search, unless told
