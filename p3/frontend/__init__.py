"""What the front ends have in common, over a Session (p3/worker/session.py): none of it knows a framework.

    order       in which order forward passes use the keys: how urgent each gradient is
    waiting     how a script waits for its job
"""
