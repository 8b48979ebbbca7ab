"""Snapshots of a job on disk, from which it can be resumed: files.py, and trees of values in them: tree.py."""
