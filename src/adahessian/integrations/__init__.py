"""Trainers of other libraries, each imported only on use."""
