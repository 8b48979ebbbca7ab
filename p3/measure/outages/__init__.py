"""`p3 bench outages`: one training in which processes die, by P3 and by what else goes on or starts again."""
