"""Load on a server and what became of it: who arrives when, how long each waited, one page to read."""
