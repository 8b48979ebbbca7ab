"""What measures P3: hosts in a lab, replayed models, experiments, faults. Nothing that trains imports it."""
