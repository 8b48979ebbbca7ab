"""What the front ends have in common, over a Session (p3/worker/session.py): none of it knows a framework.

docs/frontend.md says what each module is for.
"""
