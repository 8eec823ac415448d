"""A slow, plain reading of the method in numpy: the witness that the package is tested against."""
