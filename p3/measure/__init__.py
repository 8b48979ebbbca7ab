"""What measures P3, and no job needs: hosts in a lab, replayed models, experiments, faults. Nothing that trains imports it."""
