"""One operation a file: the public function, its torch reference and, where it pays, a faster form of the same."""
