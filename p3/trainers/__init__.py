"""What P3's trainers share: p3.transformers, p3.accelerate and p3.lightning, which import their framework alone."""
