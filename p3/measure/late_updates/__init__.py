"""How many more batches training needs if updates arrive late: chapter 5 of Zhang's thesis, on a small scale."""
