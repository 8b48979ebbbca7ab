"""What `p3 bench` measured: records, what they add up to, tables and figures. No experiment is known by name here."""
