"""Empty: MXNet imports it for downloads, which no test makes, and that takes as long as NumPy."""
