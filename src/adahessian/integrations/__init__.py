"""Integrations with the trainers of other libraries, each imported only when it is used."""
