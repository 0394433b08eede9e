"""Every JSON shape the server reads or writes, and nothing else. One validator for all routes."""
