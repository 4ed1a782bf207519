"""Hessian-vector products of a model."""
