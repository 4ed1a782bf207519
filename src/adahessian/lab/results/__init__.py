"""Run files, tables and figures."""
