"""`p3 simulate`: how long an iteration would take, without hosts. docs/simulator.md describes the model and its limits.

setting.py says what can be asked, predict.py answers, command.py is the command line.
"""
