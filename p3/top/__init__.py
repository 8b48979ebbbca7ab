"""`p3 top`: a running job in a table, again and again, or once.

    command.py    the options, and the loop
    find.py       which job, and its secret
    screen.py     a view as lines, and the terminal they stand on
"""
