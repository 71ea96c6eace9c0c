"""Kernels, each with a plain torch reference that is its specification."""
