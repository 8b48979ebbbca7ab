"""Real trainings that `p3 bench` measures: nothing is emulated; only the name of the store differs."""
