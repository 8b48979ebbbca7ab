"""`p3 doctor`: before a job starts. docs/doctor.md describes it.

here.py looks at this machine. Of several, each has an examiner.py, which hosts.py starts, or launched.py where another
launcher has started this process there; examination.py asks them in turn. facts.py is what a host knows of itself,
door.py and paths.py are the two ends of what it learns of the way to another. judgement.py finds what is wrong in all
that, forecast.py what a model would make of such a network, report.py has the words.
"""
