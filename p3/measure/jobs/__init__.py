"""Jobs that are measured: the stores, their processes on hosts, and what these use of the machine."""
