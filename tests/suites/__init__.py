"""The test suites of other projects, run against a real server."""
