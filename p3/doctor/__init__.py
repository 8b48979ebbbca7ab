"""`p3 doctor`: before a job starts. docs/doctor.md describes it.

here.py looks at this machine. With a hostfile, hosts.py starts an examiner.py on every host and asks each in turn;
facts.py is what a host knows of itself, door.py and paths.py are the two ends of what it learns of the way to another.
judgement.py finds what is wrong in all that, forecast.py what a model would make of such a network, report.py has the
words.
"""
