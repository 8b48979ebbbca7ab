"""`p3 bench outages`: one training in which processes die, by P3 and by what else goes on or starts again."""

MARK_EVERY = 5  # steps of a training between two at which others may join
SAVE_EVERY = 20  # and between two at which all is saved, where a death starts everything again
