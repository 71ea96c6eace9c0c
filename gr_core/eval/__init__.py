"""Scoring, metrics, progressive validation and the gate."""
