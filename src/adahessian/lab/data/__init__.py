"""Readers of data as its owners publish it."""
