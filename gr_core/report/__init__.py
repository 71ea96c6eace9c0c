"""What a person reads about a night: its status object, tables and figures."""
