"""What a job agrees on for each of its keys: how it is cut, and how its rounds go."""
