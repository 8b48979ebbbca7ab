"""The commands that start the processes of a job, a module each with its options: `p3 run`, `p3 exec`, `p3 join`.

p3/cli.py loads the one that is asked for, so that the others' options cost a server and a worker no time.
"""
