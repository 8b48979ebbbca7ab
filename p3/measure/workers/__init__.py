"""What the programs of measured workers share: how they join a store and leave it, and what they write."""
