"""Model versions: protocol, in-memory version, MLflow adapter, scorer."""
