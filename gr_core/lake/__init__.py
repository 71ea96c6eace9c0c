"""The lake: raw files, the event table, the journal and the URIs they live at."""
