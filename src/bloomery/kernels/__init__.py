"""One operation per file: the public function, its torch reference and its Triton kernel."""
