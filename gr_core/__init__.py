"""Everything of Daybreak that is true without Prefect: contracts, data, model, training, judging."""
